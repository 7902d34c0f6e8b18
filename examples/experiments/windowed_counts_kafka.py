"""Log events from Kafka, counted per 5 minutes of event time and path, upserted into Elasticsearch.

Three runs over the same events: undisturbed; with the driver killed in the middle; with an executor killed on a
cluster of a master and two workers. The documents are compared one by one, with each other and with a plain count.

    python windowed_counts_kafka.py [--full]

The original offered 5,000 messages a second to three servers of one core each, which handled 4,300.
"""

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

from elasticsearch import Elasticsearch as Client
from elasticsearch.helpers import scan
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink import Elasticsearch, ExactlyOnce
from epochsink_devkit.services.spark_cluster import SparkCluster
from experiment import Findings, Run, Table, bars, finish, main, make_topic, produce, seconds_of, spark_session

CORES: Final = 2
ORIGINAL_PER_CORE: Final = 4300 / 3
START: Final = 1_767_225_600
WINDOW: Final = 300
LATE_SECONDS: Final = 60
EVENT: Final = "path STRING, status INT, at TIMESTAMP"
EPOCHS: Final = 10


def pipeline(spec: dict[str, Any]) -> None:
    """Count; a trigger reads a tenth of the topic."""
    spark = spark_session(spec)
    source = {"kafka.bootstrap.servers": spec["kafka"], "subscribe": spec["topic"], "startingOffsets": "earliest"}
    messages = spark.readStream.format("kafka").options(**source, maxOffsetsPerTrigger=spec["epoch"]).load()
    events = messages.selectExpr(f"from_json(CAST(value AS STRING), '{EVENT}') AS event").select("event.*")
    counts = (
        events.withWatermark("at", "2 minutes")
        .groupBy(F.window("at", "5 minutes").alias("during"), "path")
        .count()
        .selectExpr("during.start AS start", "path", "`count` AS hits")
    )
    index = Elasticsearch(spec["elasticsearch"], index=spec["index"], key=["unix_seconds(start)", "path"])
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"index": index})
    finish(sink.start(counts.writeStream.outputMode("update").trigger(availableNow=True)), spec)


def events(count: int) -> Iterator[tuple[str, int]]:
    """Yield path and second of event time, a little out of order."""
    random = Random(7)  # noqa: S311 - made-up events
    for number in range(count):
        yield f"/{int(random.paretovariate(1.2)) % 50}", START + number * 3600 // count - random.randrange(LATE_SECONDS)


def experiment(run: Run) -> Findings:
    """Run it three times, and compare."""
    count = run.size(small=2_000, usual=400_000, full=4_000_000)
    kafka, elasticsearch = run.kafka(), run.elasticsearch()
    topic = f"log-{time.time_ns()}"
    make_topic(kafka, topic, 4)
    expected: Counter[tuple[int, str]] = Counter()

    def messages() -> Iterator[tuple[str, str, int]]:
        for path, second in events(count):
            expected[second // WINDOW * WINDOW, path] += 1
            at = datetime.fromtimestamp(second, UTC).isoformat()
            yield path, json.dumps({"path": path, "status": 200, "at": at}), second * 1000

    produce(kafka, topic, messages())
    spec = {"kafka": kafka, "elasticsearch": elasticsearch, "topic": topic, "epoch": count // EPOCHS}

    def named(name: str, **more: object) -> dict[str, Any]:
        return {**spec, "index": f"{topic}-{name}", "checkpoint": str(run.folder / name), **more}

    progress = run.run(named("undisturbed"))
    run.run(named("driver-killed"), failpoint="coordinator.record.after:4")
    run.run(named("driver-killed"))
    _with_a_killed_executor(run, named)
    found = {name: _documents(elasticsearch, f"{topic}-{name}") for name in _RUNS}
    rows = [(_RUNS[name], len(got), sum(got.values()), got == expected) for name, got in found.items()]
    per_core = count / seconds_of(progress) / CORES
    exact = all(got == expected for got in found.values())
    speed = {"the original": ORIGINAL_PER_CORE, "this run": per_core}
    return Findings(
        [
            Table(f"Windowed counts of {count:,} events", ("run", "documents", "events counted", "exact"), rows),
            Table("Events a second and core", ("", "events"), list(speed.items())),
        ],
        exact=exact,
        picture=bars(finding(speed, exact=exact), "events a second and core", speed),
    )


def finding(speed: Mapping[str, float], *, exact: bool) -> str:
    """Return the title of the picture."""
    original, this = speed.values()
    counted = "each counted once" if exact else "not each counted once"
    return f"{this / original:.1f} times the original's events a second and core, {counted}"


_RUNS: Final = {
    "undisturbed": "undisturbed",
    "driver-killed": "driver killed in the middle",
    "executor-killed": "executor killed on a cluster",
}


def _with_a_killed_executor(run: Run, named: Any) -> None:
    home = run.folder / "cluster"
    home.mkdir()
    with SparkCluster(home) as cluster:
        spec = named("executor-killed", settings=dict(cluster.settings))
        living = run.start(spec)
        commits = Path(spec["checkpoint"]) / "commits"
        deadline = time.monotonic() + 300
        while not (commits / "2").exists():
            if time.monotonic() > deadline or not living.process.running:
                living.wait()
                raise RuntimeError("no third epoch came about on the cluster")
            time.sleep(0.05)
        cluster.executors()[0].send_signal(signal.SIGKILL)
        living.wait()


def _documents(url: str, index: str) -> Mapping[tuple[int, str], int]:
    found: Counter[tuple[int, str]] = Counter()
    with closing(Client(url)) as client:
        client.indices.refresh(index=index)
        for hit in scan(client, index=index):
            document = hit["_source"]
            start = datetime.fromisoformat(document["start"]).timestamp()
            found[int(start), document["path"]] += document["hits"]
    return found


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
