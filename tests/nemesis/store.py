"""A checkpoint on a host of its own: HDFS, and how the checker's watch reads it over WebHDFS."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from epochsink.devkit.services.hdfs import LocalHdfs
from epochsink.retry import retrying
from nemesis.services import OnHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nemesis.hosts import Host

PORT: Final = 8020
WEB_PORT: Final = 9870
_SECONDS: Final = 10


class Store(OnHost, LocalHdfs):
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

    @property
    def spark_settings(self) -> dict[str, str]:
        """What a Spark session has to be told."""
        return {"spark.hadoop.dfs.namenode.http-address": f"{self.host.address}:{WEB_PORT}"}


class WatchedFiles:
    """The files of a checkpoint, as far as the checker's watch and the ledger's reader ask for them."""

    def __init__(self, store: Store, folder: str) -> None:
        self._root = f"http://{store.host.address}:{WEB_PORT}/webhdfs/v1/{folder}"

    def names(self, folder: str) -> list[str]:
        """Return the plain names of the files in a folder; none if it does not exist."""
        found = self._get(folder, "LISTSTATUS")
        listed: list[dict[str, Any]] = json.loads(found)["FileStatuses"]["FileStatus"] if found else []
        return [one["pathSuffix"] for one in listed if one["type"] == "FILE"]

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""
        return self._get(name, "OPEN")

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what `read` would for each name."""
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return self._get(name, "GETFILESTATUS") is not None

    def _get(self, name: str, operation: str) -> bytes | None:
        # a store on a busy machine may take longer than one try
        return retrying(lambda failure: isinstance(failure, TimeoutError), attempts=6)(self._ask, name, operation)

    def _ask(self, name: str, operation: str) -> bytes | None:
        try:
            with urllib.request.urlopen(
                f"{self._root}/{name}?op={operation}&user.name=root", timeout=_SECONDS
            ) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            if refused.code == 404:
                return None
            raise
