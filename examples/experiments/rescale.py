"""Partitions and cores change between runs, while an epoch is recorded and not decided: every row stays there once.

The input topic begins with two partitions and one core; before each further run it gets more of both. Each run but the
last is killed with an epoch in the ledger that the checkpoint has not decided.

    python rescale.py
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from epochsink import ExactlyOnce, Kafka
from experiment import Findings, Run, Table, finish, lines, main, make_topic, produce, read_topic, spark_session

SCALES: Final = ((2, 1), (4, 2), (8, 3), (8, 1))
"""Partitions of the input and cores, run by run."""


def pipeline(spec: dict[str, Any]) -> None:
    """Copy a topic."""
    spark = spark_session(spec)
    source = {"kafka.bootstrap.servers": spec["kafka"], "subscribe": spec["topic"], "startingOffsets": "earliest"}
    messages = spark.readStream.format("kafka").options(**source, maxOffsetsPerTrigger=spec["epoch"]).load()
    copy = Kafka(bootstrap_servers=spec["kafka"], topic=spec["copy"], select=["CAST(value AS STRING) AS number"])
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"copy": copy})
    # with availableNow, Spark refuses an epoch of fewer partitions than the topic has by now
    query = sink.start(messages.writeStream)
    query.processAllAvailable()
    query.stop()
    finish(query, spec)


def experiment(run: Run) -> Findings:
    """Grow and shrink."""
    count = run.size(small=400, usual=20_000, full=1_000_000)
    kafka, topic = run.kafka(), f"scaled-{time.time_ns()}"
    copy = f"{topic}-copy"
    make_topic(kafka, topic, SCALES[0][0])
    make_topic(kafka, copy, 3)
    admin = AdminClient({"bootstrap.servers": kafka})
    spec = {
        "kafka": kafka,
        "topic": topic,
        "copy": copy,
        "checkpoint": str(run.folder / "checkpoint"),
        "epoch": count // 2,
    }
    rows, written, partitions = [], 0, SCALES[0][0]
    drawn: dict[str, list[tuple[float, float]]] = {"fed": [], "visible": []}
    for wanted, cores in SCALES:
        if wanted > partitions:
            admin.create_partitions([NewPartitions(topic, wanted)])[topic].result(30)
            partitions = wanted
        produce(kafka, topic, ((str(number), str(number), 0) for number in range(written, written + count)))
        written += count
        last = (wanted, cores) == SCALES[-1]
        run.run(
            {**spec, "settings": {"spark.master": f"local[{cores}]"}},
            failpoint="" if last else "coordinator.record.after:1",
        )
        found = Counter(int(row["number"]) for row in read_topic(kafka, copy))
        twice = sum(found.values()) - len(found)
        rows.append((f"partitions {wanted}, cores {cores}", "ended" if last else "killed", written, len(found), twice))
        drawn["fed"].append((len(rows), written))
        drawn["visible"].append((len(rows), len(found)))
    exact = found == Counter(range(written))
    headings = ("run", "how it ended", "rows so far", "visible", "twice")
    title = "Partitions and cores changed between runs"
    return Findings(
        [Table(title, headings, rows)], exact, lines(finding(rows), "fed and visible", "rows", "run", drawn)
    )


def finding(rows: Sequence[tuple[str, str, int, int, int]]) -> str:
    """Return the title of the picture."""
    _, _, fed, visible, twice = rows[-1]
    return f"{len(rows)} runs with other partitions and cores: {fed - visible:,} of {fed:,} rows lost, {twice:,} twice"


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
