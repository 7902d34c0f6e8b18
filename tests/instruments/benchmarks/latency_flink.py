"""A Kafka topic into another by Flink's KafkaSink, exactly-once: what `bench_latency.py` starts in Flink's environment.

Run as ``python latency_flink.py SPEC`` (JSON). It says READY when the job runs, and runs until its input ends.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from flink_job import install  # its environment has nothing but Flink

# in the environment of its own
from pyflink.table import EnvironmentSettings, TableEnvironment  # type: ignore[import-not-found]

READY: Final = "READY"


def main() -> None:
    """Run the job."""
    spec = json.loads(sys.argv[1])
    install(Path(spec["jar"]))
    with tempfile.TemporaryDirectory(prefix="epochsink-bench-", ignore_cleanup_errors=True) as folder:
        run(spec, folder)


def run(spec: dict[str, Any], checkpoints: str) -> None:
    """Run the job, with its checkpoints in a folder."""
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    settings = {
        "parallelism.default": str(spec["parallelism"]),
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.interval": f"{spec['interval']} ms",
        "execution.checkpointing.dir": Path(checkpoints).as_uri(),
        "pipeline.object-reuse": "true",
        "rest.bind-port": "0",
    }
    for name, value in settings.items():
        tables.get_config().set(name, value)
    place = f"'connector' = 'kafka', 'format' = 'raw', 'properties.bootstrap.servers' = '{spec['servers']}'"
    tables.execute_sql(
        f"CREATE TABLE source (line STRING) WITH ({place}, 'topic' = '{spec['source']}', "
        "'properties.group.id' = 'flink', 'scan.startup.mode' = 'earliest-offset')"
    ).wait()
    tables.execute_sql(
        f"CREATE TABLE target (line STRING) WITH ({place}, 'topic' = '{spec['target']}', "
        f"'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = '{spec['target']}', "
        "'properties.transaction.timeout.ms' = '600000')"
    ).wait()
    job = tables.execute_sql("INSERT INTO target SELECT line FROM source").get_job_client()
    while job.get_job_status().result().name != "RUNNING":
        time.sleep(0.1)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    sys.stdin.read()
    job.cancel().result()


if __name__ == "__main__":
    main()
