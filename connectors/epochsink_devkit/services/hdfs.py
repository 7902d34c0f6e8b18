"""Run HDFS (one NameNode and one DataNode with one replica) as plain processes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import pyspark

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.java import LIGHTLY, java
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.ports import LOOPBACK, free_port

HEAP: Final = "256m"
_NAME_NODE: Final = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE: Final = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_READY: Final = "BLOCK* registerDatanode"
_LOGGING: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""
# PySpark ships Hadoop's client jars, and the daemons run on their classes.
_SHIPPED: Final = ("hadoop-client-*.jar", "slf4j-api-*.jar", "log4j-*.jar", "jcl-over-slf4j-*.jar")
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

    def _prepare(self) -> None:
        self._choose_port()
        for pages in _WEB_PAGES:
            (self.home / "classes" / "webapps" / pages).mkdir(parents=True, exist_ok=True)
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
        classes = self.home / "classes"
        (classes / "log4j2.properties").write_text(_LOGGING)
        self._write_site(classes / "hdfs-site.xml", self._properties())
        self._write_site(classes / "core-site.xml", {"fs.defaultFS": self.url})
        class_path = ":".join(map(str, [classes, *self._jars()]))
        return [java(), LIGHTLY, f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-cp", class_path, main]

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

    @staticmethod
    def _write_site(path: Path, properties: dict[str, str]) -> None:
        lines = (
            f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
            for name, value in properties.items()
        )
        path.write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")

    def _jars(self) -> list[Path]:
        shipped = Path(pyspark.__file__).parent / "jars"
        jars = [jar for pattern in _SHIPPED for jar in shipped.glob(pattern)]
        return [*fetch(versions.hdfs_bundle()).glob("*.jar"), *jars]
