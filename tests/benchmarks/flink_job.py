"""Lines of text files into a Kafka topic by Flink's KafkaSink: what `bench_flink.py` starts in Flink's own environment.

All of it runs in Flink's JVM: the files are read, and the lines written, as they are. A request is a line of JSON on
the standard input, with the topic, the folder and the guarantee; the answer, on the standard output, the seconds from
when the job was handed over until it had ended, with the last checkpoint, and so the last transaction.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

# in the environment of its own
from pyflink.table import EnvironmentSettings, TableEnvironment  # type: ignore[import-not-found]

ANSWER = "FLINK "


def environment(jar: str, parallelism: int) -> TableEnvironment:
    """Return Flink with the connector, which commits once a second."""
    table = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    settings = table.get_config()
    settings.set("pipeline.jars", Path(jar).as_uri())
    settings.set("parallelism.default", str(parallelism))
    settings.set("execution.checkpointing.interval", "1 s")
    settings.set("pipeline.object-reuse", "true")
    return table


def run(table: TableEnvironment, request: dict[str, str], servers: str, options: dict[str, str]) -> float:
    """Write all lines of a folder into a topic; return the seconds."""
    name = f"t{uuid.uuid4().hex[:8]}"
    producer = "".join(f", 'properties.{key}' = '{value}'" for key, value in options.items())
    table.execute_sql(
        f"CREATE TABLE {name}_lines (line STRING) WITH ('connector' = 'filesystem', 'path' = '{request['folder']}', "
        "'format' = 'raw')"
    ).wait()
    table.execute_sql(
        f"CREATE TABLE {name}_topic (line STRING) WITH ('connector' = 'kafka', 'topic' = '{request['topic']}', "
        f"'properties.bootstrap.servers' = '{servers}', 'format' = 'raw', "
        f"'sink.delivery-guarantee' = '{request['guarantee']}', 'sink.transactional-id-prefix' = '{name}', "
        f"'properties.transaction.timeout.ms' = '600000'{producer})"
    ).wait()
    begun = time.perf_counter()
    table.execute_sql(f"INSERT INTO {name}_topic SELECT line FROM {name}_lines").wait()  # noqa: S608 - names made here
    return time.perf_counter() - begun


def main() -> None:
    """Answer requests until there are no more."""
    said = json.loads(sys.argv[1])
    table = environment(said["jar"], said["parallelism"])
    for line in sys.stdin:
        seconds = run(table, json.loads(line), said["servers"], said["options"])
        sys.stdout.write(f"{ANSWER}{seconds}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
