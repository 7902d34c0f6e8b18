"""Lines of text files into a Kafka topic by Flink's KafkaSink: what `bench_flink.py` starts in Flink's own environment.

All of it runs in Flink's JVM: the files are read, and the lines written, as they are. One cluster runs all jobs, so
that nothing but a job is timed, and the connector is where the cluster's own jars are, so that what the JVM has
compiled for one job serves the next.

A request is a line of JSON on the standard input, with the topic, the folder and the guarantee; the answer, on the
standard output, the seconds from when the cluster began to run the job until it had ended, with the last checkpoint,
and so with the commit of the last transaction.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

# in the environment of its own
import pyflink  # type: ignore[import-not-found]
from pyflink.java_gateway import get_gateway  # type: ignore[import-not-found]
from pyflink.table import EnvironmentSettings, TableEnvironment  # type: ignore[import-not-found]

ANSWER = "FLINK "


class Cluster:
    """Flink's JobManager and TaskManager, in the JVM that this process starts."""

    def __init__(self, slots: int) -> None:
        flink = get_gateway().jvm.org.apache.flink
        configuration = flink.configuration.Configuration()
        configuration.setString("rest.bind-port", "0")
        wanted = flink.runtime.minicluster.MiniClusterConfiguration.Builder().setConfiguration(configuration)
        self._cluster = flink.runtime.minicluster.MiniCluster(wanted.setNumSlotsPerTaskManager(slots).build())
        self._cluster.start()
        self._states = flink.api.common.JobStatus

    def tables(self, parallelism: int) -> TableEnvironment:
        """Return an environment whose jobs run here, and are committed when they end: one transaction for each task."""
        address = self._cluster.getRestAddress().get()
        settings = {
            "execution.target": "remote",
            "rest.address": address.getHost(),
            "rest.port": str(address.getPort()),
            "parallelism.default": str(parallelism),
            "execution.checkpointing.interval": "10 min",
            "pipeline.object-reuse": "true",
        }
        tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
        for name, value in settings.items():
            tables.get_config().set(name, value)
        return tables

    def seconds(self, job: Any) -> float:
        """Return how long a job has run, by the JobManager's own clock."""
        graph = self._cluster.getArchivedExecutionGraph(job).get()
        ended, begun = (graph.getStatusTimestamp(state) for state in (self._states.FINISHED, self._states.RUNNING))
        return float(ended - begun) / 1000


def run(cluster: Cluster, tables: TableEnvironment, request: dict[str, str], said: dict[str, Any]) -> float:
    """Write all lines of a folder into a topic; return the seconds."""
    name = f"t{uuid.uuid4().hex[:8]}"
    producer = "".join(f", 'properties.{key}' = '{value}'" for key, value in said["options"].items())
    tables.execute_sql(
        f"CREATE TABLE {name}_lines (line STRING) WITH ('connector' = 'filesystem', 'path' = '{request['folder']}', "
        "'format' = 'raw')"
    ).wait()
    tables.execute_sql(
        f"CREATE TABLE {name}_topic (line STRING) WITH ('connector' = 'kafka', 'topic' = '{request['topic']}', "
        f"'properties.bootstrap.servers' = '{said['servers']}', 'format' = 'raw', "
        f"'sink.delivery-guarantee' = '{request['guarantee']}', 'sink.transactional-id-prefix' = '{name}', "
        f"'properties.transaction.timeout.ms' = '600000'{producer})"
    ).wait()
    job = tables.execute_sql(f"INSERT INTO {name}_topic SELECT line FROM {name}_lines")  # noqa: S608 - names made here
    job.wait()
    return cluster.seconds(job.get_job_client().get_job_id()._j_job_id)


def install(jar: Path) -> None:
    """Put the connector where Flink's own jars are, as its documentation has it; before the JVM starts."""
    installed = Path(pyflink.__file__).parent / "lib" / jar.name
    if not installed.exists():
        installed.symlink_to(jar)


def main() -> None:
    """Answer requests until there are no more."""
    said = json.loads(sys.argv[1])
    install(Path(said["jar"]))
    cluster = Cluster(said["parallelism"])
    tables = cluster.tables(said["parallelism"])
    for line in sys.stdin:
        seconds = run(cluster, tables, json.loads(line), said)
        sys.stdout.write(f"{ANSWER}{seconds}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
