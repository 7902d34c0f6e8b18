"""Run HDFS (one NameNode and one DataNode with one replica) as plain processes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Final

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.hadoop import daemon, write_site
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.ports import LOOPBACK, free_port

_NAME_NODE: Final = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE: Final = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_READY: Final = "BLOCK* registerDatanode"
# The nodes need a folder of web pages, and exit without a message if it is missing.
_WEB_PAGES: Final = ("hdfs", "datanode", "static")


class LocalHdfs(LocalService):
    """One HDFS; `settings` go into hdfs-site.xml. It does not authenticate clients."""

    name = "hdfs"
    _web_port: int | None = None

    @property
    def version(self) -> str:
        return versions.hadoop()

    @property
    def url(self) -> str:
        """Its root, for Spark."""
        return f"hdfs://{LOOPBACK}:{self.port}"

    @property
    def web_port(self) -> int:
        """The NameNode's HTTP port for WebHDFS, the same across restarts."""
        if self._web_port is None:
            self._web_port = free_port()
        return self._web_port

    @property
    def address(self) -> str:
        """The root's URL."""
        return self.url

    @property
    def spark_settings(self) -> dict[str, str]:
        """The settings that a Spark session needs. On a real cluster they come from hdfs-site.xml."""
        return {"spark.hadoop.dfs.namenode.http-address": f"{LOOPBACK}:{self.web_port}"}

    @property
    def settings_folder(self) -> Path:
        """The folder with hdfs-site.xml and core-site.xml, which clients may use as HADOOP_CONF_DIR."""
        return self.home / "classes"

    def _prepare(self) -> None:
        self._choose_port()
        for pages in _WEB_PAGES:
            (self.settings_folder / "webapps" / pages).mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*self._node(_NAME_NODE), "-format", "-force"],
            capture_output=True,
            text=True,
            check=False,
            env=self._environment(),
            cwd=self.home,
        )
        if done.returncode != 0:
            raise ServiceError(f"HDFS could not format {self.data}:\n{done.stdout}{done.stderr}")

    def _command(self) -> list[str]:
        nodes = [shlex.join(self._node(kind)) for kind in (_NAME_NODE, _DATA_NODE)]
        # Both are one service: it passes a signal on, and if one of them ends, it ends the other.
        return [
            "/bin/bash",
            "-c",
            f"trap 'kill $(jobs -p); wait' TERM; {nodes[0]} & {nodes[1]} & wait -n; kill $(jobs -p)",
        ]

    def _is_ready(self) -> bool:
        return _READY in self._log_of_this_start()

    def _node(self, main: str) -> list[str]:
        classes = self.settings_folder
        write_site(classes / "hdfs-site.xml", self._properties())
        write_site(classes / "core-site.xml", {"fs.defaultFS": self.url})
        return daemon(main, classes, versions.hdfs_bundle())

    def _properties(self) -> dict[str, str]:
        defaults: dict[str, str | int | bool] = {
            "dfs.replication": 1,
            "dfs.namenode.name.dir": f"file://{self.data}/name",
            "dfs.datanode.data.dir": f"file://{self.data}/blocks",
            "dfs.namenode.http-address": f"{LOOPBACK}:{self.web_port}",
            "dfs.datanode.address": f"{LOOPBACK}:0",
            "dfs.datanode.http.address": f"{LOOPBACK}:0",
            "dfs.datanode.ipc.address": f"{LOOPBACK}:0",
            "dfs.datanode.hostname": LOOPBACK,
            "dfs.permissions.superusergroup": "root",
            # Leave safe mode as soon as the restarted node has reported enough blocks.
            "dfs.namenode.safemode.extension": 0,
        }
        return {name: self._with_port(value) for name, value in {**defaults, **self.settings}.items()}
