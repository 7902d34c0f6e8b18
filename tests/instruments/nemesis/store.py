"""A checkpoint on a host of its own: HDFS or S3, and how the checker's watch reads it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final, cast

from bench_checkpoint import s3a_packages

from epochsink.protocol.object_storage import ObjectStorage, open_store
from epochsink.retry import retrying
from epochsink_devkit.services import spark_packages
from epochsink_devkit.services.hdfs import LocalHdfs
from epochsink_devkit.services.s3 import BUCKET, LocalS3
from nemesis.services import OnHost, answers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from epochsink.protocol.storage import Storage
    from nemesis.hosts import Host

PORT: Final = 8020
WEB_PORT: Final = 9870
S3_PORT: Final = 9000
_SECONDS: Final = 10


class Store(OnHost):
    """A store on a host. ``url`` is its root, for Spark."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def session_settings(self) -> dict[str, str]:
        """Return what a Spark session has to be told."""

    @abstractmethod
    def files(self, folder: str) -> Storage:
        """Return the files below a folder, for the checker's watch, which only reads."""


class Hdfs(Store, LocalHdfs):
    """One NameNode and one DataNode on a host."""

    def __init__(self, host: Host) -> None:
        settings: dict[str, str | int | bool] = {
            "dfs.namenode.http-address": f"{host.address}:{WEB_PORT}",
            "dfs.datanode.address": f"{host.address}:9866",
            "dfs.datanode.http.address": f"{host.address}:9864",
            "dfs.datanode.ipc.address": f"{host.address}:9867",
            "dfs.datanode.hostname": host.address,
            "dfs.namenode.rpc-bind-host": host.address,
        }
        super().__init__(settings, home=host.folder / "hdfs", port=PORT)
        self.host = host

    @property
    def url(self) -> str:
        """Its root, for Spark."""
        return f"hdfs://{self.host.address}:{PORT}"

    def session_settings(self) -> dict[str, str]:
        """Return what a Spark session has to be told."""
        return {"spark.hadoop.dfs.namenode.http-address": f"{self.host.address}:{WEB_PORT}"}

    def files(self, folder: str) -> Storage:
        """Return the files below a folder, to read: the driver's own client would be one more Java."""
        return cast("Storage", HdfsFiles(f"http://{self.host.address}:{WEB_PORT}/webhdfs/v1/{folder}"))


class S3(Store, LocalS3):
    """One S3 API on a host."""

    def __init__(self, host: Host) -> None:
        self.listens_on = host.address
        super().__init__(home=host.folder / "s3", port=S3_PORT)
        self.host = host

    @property
    def url(self) -> str:
        """Its root, for Spark."""
        return f"s3a://{BUCKET}"

    def session_settings(self) -> dict[str, str]:
        """Return what a Spark session has to be told; its own jars are where every host finds them."""
        jars = ":".join(map(str, [*spark_packages(), *s3a_packages()]))
        return {
            **self.spark_settings,
            "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
            "spark.driver.extraClassPath": jars,
            "spark.executor.extraClassPath": jars,
        }

    def files(self, folder: str) -> Storage:
        """Return the files below a folder."""
        given = {"endpoint": self.endpoint, "access_key_id": "anyone", "secret_access_key": "anything"}
        return ObjectStorage(open_store(f"{self.url}/{folder}", json.dumps(given | {"region": "us-east-1"})))

    def _is_ready(self) -> bool:
        return answers(self.host.address, S3_PORT)


STORES: Final[dict[str, Callable[[Host], Store]]] = {"hdfs": Hdfs, "s3": S3}


class HdfsFiles:
    """What the checker's watch and the ledger's reader ask for, through WebHDFS, below ``root``."""

    def __init__(self, root: str) -> None:
        self._root = root

    def names(self, folder: str) -> list[str]:
        """Return the plain names of what is in a folder; none if it does not exist."""
        found = _get(f"{self._root}/{folder}?op=LISTSTATUS&user.name=root")
        listed: list[dict[str, Any]] = json.loads(found)["FileStatuses"]["FileStatus"] if found else []
        return [one["pathSuffix"] for one in listed]

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""
        return _get(f"{self._root}/{name}?op=OPEN&user.name=root")

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what `read` would for each name."""
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return _get(f"{self._root}/{name}?op=GETFILESTATUS&user.name=root") is not None


def _get(url: str) -> bytes | None:
    # a store on a busy machine may take longer than one try
    return retrying(lambda failure: isinstance(failure, TimeoutError), attempts=6)(_ask, url)


def _ask(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as refused:
        if refused.code == 404:
            return None
        raise
