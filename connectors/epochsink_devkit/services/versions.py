"""Pin the versions that the services run. A test compares docker/compose.yaml with them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pyspark

from epochsink.errors import ServiceError

_KAFKA = "4.4.0"
_POSTGRES = "18.6"
KAFKA = os.environ.get("EPOCHSINK_KAFKA") or _KAFKA
"""The version of Kafka: the pinned one, or the one that the environment variable EPOCHSINK_KAFKA names."""
POSTGRES = os.environ.get("EPOCHSINK_POSTGRES") or _POSTGRES
"""The version of PostgreSQL, by the environment variable EPOCHSINK_POSTGRES."""
POSTGRES_JDBC = "42.7.14"
_POSTGRES_JDBC_SHA256 = "73914527305a40cce504b0d3d90b23caf565136912d607ae8ae7c5895512332c"
JAVA_MINIMUM = 17

IMAGES_VARIABLE = "EPOCHSINK_IMAGES"
"""Environment variable: the registry of the services' images, instead of the original registries."""


@dataclass(frozen=True)
class Image:
    """A container's image: its original registry, name and version."""

    origin: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"{os.environ.get(IMAGES_VARIABLE) or self.origin}/{self.name}:{self.version}"


KAFKA_IMAGE = Image("docker.io/apache", "kafka", KAFKA)
POSTGRES_IMAGE = Image("docker.io/library", "postgres", POSTGRES)


@dataclass(frozen=True)
class Artifact:
    """A Maven artifact. If `sha256` is set, the fetched file must have that digest.

    With a `classifier` it is that file of the artifact, with this extension, and without its dependencies.
    """

    organisation: str
    module: str
    version: str
    sha256: str | None = None
    classifier: str | None = None
    extension: str = "jar"

    @property
    def coordinate(self) -> str:
        """The coordinates in the form of Spark and Maven."""
        return f"{self.organisation}:{self.module}:{self.version}"

    @property
    def file_name(self) -> str:
        """Name of the file in a fetched bundle."""
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.module}-{self.version}{classifier}.{self.extension}"


@dataclass(frozen=True)
class Bundle:
    """Artifacts that are resolved together, with their dependencies, into one folder."""

    name: str
    artifacts: tuple[Artifact, ...]
    exclude_modules: tuple[str, ...] = ()
    locked: bool = True
    """Whether jars.sha256 must have every jar of the bundle; else only jars listed there are compared."""


REGISTRY = "2.5.11.Final"
REGISTRY_BUNDLE = Bundle(
    f"registry-{REGISTRY}",
    (
        Artifact(
            "io.apicurio",
            "apicurio-registry-app",
            REGISTRY,
            "f894a17f650ec427de72cfb68edfc30f8020743269293e58372e22f67fd4fd15",
            classifier="all",
            extension="tar.gz",
        ),
    ),
)

KAFKA_BUNDLE = Bundle(
    f"kafka-{KAFKA}",
    (
        Artifact(
            "org.apache.kafka",
            "kafka_2.13",
            KAFKA,
            "76d3314f873571677ff98620ab9a431e508e3687f921a3df4f70d692a970475e" if KAFKA == _KAFKA else None,
        ),
        # The broker's artifact has slf4j without a binding, so nothing would be logged.
        Artifact(
            "org.apache.logging.log4j",
            "log4j-slf4j-impl",
            "2.25.5",
            "3d25b926bc6025c47ec010459749c12aa66b9d5537ba1922d67d89a098a66607",
        ),
    ),
    locked=KAFKA == _KAFKA,
)


@dataclass(frozen=True)
class ElasticsearchRelease:
    """One version of the server, for clients of its major version."""

    version: str
    java_minimum: int
    java_newest: int
    java_options: tuple[str, ...]
    sha256: str | None
    http_sha256: str | None

    @property
    def bundle(self) -> Bundle:
        """The server's jars."""
        server = Artifact("org.elasticsearch", "elasticsearch", self.version, self.sha256)
        return Bundle(f"elasticsearch-{self.version}", (server,), locked=self.sha256 is not None)

    @property
    def http_bundle(self) -> Bundle:
        """The HTTP transport, which is a module: it and its netty jars need a separate folder."""
        transport = Artifact("org.elasticsearch.plugin", "transport-netty4", self.version, self.http_sha256)
        return Bundle(f"elasticsearch-netty-{self.version}", (transport,), locked=self.http_sha256 is not None)

    @property
    def image(self) -> Image:
        """The container's image."""
        return Image("docker.elastic.co/elasticsearch", "elasticsearch", self.version)


ELASTICSEARCH = {
    8: ElasticsearchRelease(
        "8.19.21",
        17,
        23,  # this release needs the security manager, which Java 24 removed
        ("-Djava.security.manager=allow",),
        "f69404b43afa0b5fbbd135c4b2b5cc5cac150a0eed4a94fbe820a821663bbf09",
        "3c11b0a17907432e5425df1500c71461376a6b270de265b55cf0ee5f6918cbc7",
    ),
    9: ElasticsearchRelease(
        "9.5.3",
        21,
        25,
        (),
        "d64564a4575fa1dfcb1bd95162d608005d82d3ee7dc18836d3f8c37025671f2d",
        "97bcc314d74f57a4dd071ee4f95bea10fc1eeca0de99394d625b947e4b0928ce",
    ),
}
"""By major version."""


@dataclass(frozen=True)
class OpenSearchRelease(ElasticsearchRelease):
    """One version of OpenSearch's server. Every version of its client works with it."""

    loader_sha256: str = ""
    http_class: str = ""
    log4j: str = ""
    log4j_sha256: str = ""

    @property
    def bundle(self) -> Bundle:
        """The server's jars, and two that its artifact does not name: the class loader of modules, and the log."""
        server = Artifact("org.opensearch", "opensearch", self.version, self.sha256)
        loader = Artifact("org.opensearch", "opensearch-plugin-classloader", self.version, self.loader_sha256)
        log = Artifact("org.apache.logging.log4j", "log4j-core", self.log4j, self.log4j_sha256)
        return Bundle(f"opensearch-{self.version}", (server, loader, log))

    @property
    def http_bundle(self) -> Bundle:
        """The HTTP transport, likewise."""
        transport = Artifact("org.opensearch.plugin", "transport-netty4-client", self.version, self.http_sha256)
        return Bundle(f"opensearch-netty-{self.version}", (transport,))

    @property
    def image(self) -> Image:
        """The container's image."""
        return Image("docker.io/opensearchproject", "opensearch", self.version)


OPENSEARCH = {
    2: OpenSearchRelease(
        "2.19.6",
        17,
        23,
        ("-Djava.security.manager=allow",),
        "1befd40f7ef012f38fd03f33777dd03b3fe2c886a3ca454a4ef12395f7d9215b",
        "5a67524df92c464a8ffd731a4f0a7c16daa09e37a3afc8331557fd14882b9ac9",
        "66c27b9c63dff32ecae1776a08f4a58081b3f0d442fea84be3825909bb6cc14d",
        "Netty4Plugin",
        "2.25.4",
        "10fee2c0485d54fa44ee75d314f6295508f7b932281873db61a91b88073200e6",
    ),
    3: OpenSearchRelease(
        "3.9.0",
        21,
        25,
        (),
        "6c80ecc6c88cd3ff66e87f6acb1b56ff8dc606994b475d1528e535ee5f9fa5ff",
        "fee3a2b1f95b0f4e2d7422b83c9ee39ce272b11f1eb36871181f8f9d71afdb64",
        "29e34677cb41b42a659fbe3d8304430d30194eea7280a5c94bc96c702e30968b",
        "Netty4ModulePlugin",
        "2.25.5",
        "050c4f85deb48b055e9c041ac39043fbb79ce477841a11a1eb2969c86c6a0072",
    ),
}
"""By major version."""


def elasticsearch() -> ElasticsearchRelease:
    """Return the release of the installed client's major version, or the one that EPOCHSINK_ELASTICSEARCH names."""
    if version := os.environ.get("EPOCHSINK_ELASTICSEARCH"):
        majors = {str(major): release for major, release in ELASTICSEARCH.items()}
        if (pinned := majors.get(version.partition(".")[0])) is None:
            raise ServiceError(
                f"EPOCHSINK_ELASTICSEARCH={version}: no version of this major is pinned",
                hint=f"name a version {' or '.join(majors)}",
            )
        return pinned if version == pinned.version else replace(pinned, version=version, sha256=None, http_sha256=None)
    try:
        major = int(metadata.version("elasticsearch").partition(".")[0])
    except metadata.PackageNotFoundError:
        major = min(ELASTICSEARCH)
    if major not in ELASTICSEARCH:
        raise ServiceError(
            f"no Elasticsearch {major} is pinned for the installed client {metadata.version('elasticsearch')}",
            hint=f"install a client of the major version {' or '.join(map(str, ELASTICSEARCH))}",
        )
    return ELASTICSEARCH[major]


_POSTGRES_BINARIES = {
    "x86_64": ("amd64", "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1"),
    "aarch64": ("arm64v8", "5f54e016723afa6213925a8acb939bac52944b1d348f65c7a20f0cd2928c31be"),
}


def postgres_bundle(machine: str | None = None) -> Bundle:
    """Return the PostgreSQL binaries for this processor (`platform.machine()`). Raises `ServiceError` if none exist."""
    machine = machine or platform.machine()
    if machine not in _POSTGRES_BINARIES:
        raise ServiceError(
            f"no PostgreSQL binaries are pinned for a {machine} processor",
            hint=f"use --docker; pinned are {', '.join(_POSTGRES_BINARIES)}",
        )
    name, sha256 = _POSTGRES_BINARIES[machine]
    module = f"embedded-postgres-binaries-linux-{name}"
    pinned = POSTGRES == _POSTGRES
    programs = Artifact("io.zonky.test.postgres", module, f"{POSTGRES}.0", sha256 if pinned else None)
    return Bundle(f"postgres-{POSTGRES}-{name}", (programs,), locked=pinned)


LOCKED_SPARK = "4.2.0"
"""The newest PySpark whose Kafka source is published. jars.sha256 has its jars, and those of HDFS with its Hadoop."""


def spark_kafka() -> Artifact:
    """Spark's Kafka source and sink, in the installed PySpark's version."""
    return Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", pyspark.__version__)


def spark_avro() -> Artifact:
    """Spark's functions for Avro, in the installed PySpark's version."""
    return Artifact("org.apache.spark", "spark-avro_2.13", pyspark.__version__)


def postgres_jdbc() -> Artifact:
    """PostgreSQL's JDBC driver, for Spark's own JDBC reader and writer."""
    return Artifact("org.postgresql", "postgresql", POSTGRES_JDBC, _POSTGRES_JDBC_SHA256)


def hadoop() -> str:
    """Return the version of the Hadoop client in the installed PySpark. HDFS's daemons must have the same."""
    (client,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    return client.stem.removeprefix("hadoop-client-api-")


def hdfs_bundle() -> Bundle:
    """HDFS's daemons, chosen to run on the client jars that PySpark ships."""
    return Bundle(
        f"hdfs-{hadoop()}",
        (
            Artifact("org.apache.hadoop", "hadoop-client-minicluster", hadoop()),
            # part of Java only up to version 8
            Artifact("javax.xml.bind", "jaxb-api", "2.3.1"),
        ),
        exclude_modules=("hadoop-client-api", "hadoop-client-runtime", "junit", "mockito-core"),
        locked=pyspark.__version__ == LOCKED_SPARK,
    )


YARN_BUNDLE = Bundle("yarn", (Artifact("org.bouncycastle", "bcpkix-jdk18on", "1.78.1"),))
"""What YARN's daemons need beside HDFS's jars, which hold both."""
