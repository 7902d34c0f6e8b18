"""Rows written and rows read, byte for byte: generated ones, and those of Spark's own Kafka sink."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from kafka.partitioner.default import murmur2
from kafka_kit import Reader, commit, committing, create_topic, epoch, identity, prepare, task

from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from fix_services import FreshName
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import KafkaService

PARTITIONS = 3
SCHEMAS, ROWS = 300, 10_500
LARGE = 1 << 20
LARGEST = 3 * LARGE
"""A row's key and value may both be large."""

BYTES = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
TIMES = (pa.timestamp("us", tz="UTC"), pa.timestamp("us"), pa.timestamp("ms", tz="Europe/Berlin"), pa.timestamp("ns"))
MILLISECOND = dt.timedelta(milliseconds=1)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Generator:
    """Makes record batches with the writer's columns, each of another schema; ``chance`` decides everything."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._large = 3

    def batch(self, rows: int) -> pa.RecordBatch:
        """Return a batch, which may be a slice of a larger one."""
        before, after = (self._chance.choice([0, 1, 9]) for _ in range(2))
        total = before + rows + after
        columns = {"value": self._bytes(total)}
        for name, make in (
            ("key", self._bytes),
            ("headers", self._headers),
            ("timestamp", self._times),
            ("partition", self._partitions),
        ):
            if self._chance.random() < 0.5:
                columns[name] = make(total)
        names = self._chance.sample(list(columns), len(columns))
        return pa.record_batch({name: columns[name] for name in names}).slice(before, rows)

    def _column(self, kind: pa.DataType, rows: int, make: Callable[[], Any]) -> pa.Array:
        nulls = self._chance.choice([0, 0, 0.2, 1])
        return pa.array([None if self._chance.random() < nulls else make() for _ in range(rows)], kind)

    def _content(self, *, text: bool) -> str | bytes:
        size = self._chance.choice([0, 1, 2, 3, 7, 20, 100, 1000])
        if self._large and self._chance.random() < 0.002:
            self._large -= 1
            size = LARGE
        if text:
            piece = "".join(self._chance.choices("aZ0 \0\n\"'\\ßж語😀", k=min(size, 100)))
            return piece * (size // 1000 or 1)
        return self._chance.randbytes(size)

    def _bytes(self, rows: int) -> pa.Array:
        kind = self._chance.choice(BYTES)
        return self._column(kind, rows, lambda: self._content(text="string" in str(kind)))

    def _headers(self, rows: int) -> pa.Array:
        text = self._chance.random() < 0.5
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string() if text else pa.binary())]))

        def header() -> dict[str, Any]:
            value = None if self._chance.random() < 0.2 else self._content(text=text)
            return {"key": self._chance.choice(["", "trace", "ключ"]), "value": value}

        return self._column(kind, rows, lambda: [header() for _ in range(self._chance.randrange(4))])

    def _times(self, rows: int) -> pa.Array:
        milliseconds = self._column(pa.int64(), rows, lambda: self._chance.randrange(1, 1_500_000_000_000))
        return milliseconds.cast(pa.timestamp("ms", tz="UTC")).cast(self._chance.choice(TIMES))

    def _partitions(self, rows: int) -> pa.Array:
        return self._column(pa.int32(), rows, lambda: self._chance.randrange(PARTITIONS))


def encoded(content: str | bytes | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content


def wanted(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a reader has to see: key, value, headers, time, partition; None for a time or partition not said."""
    key = encoded(row.get("key"))
    partition = row.get("partition")
    if partition is None and key is not None:
        partition = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
    headers = tuple((header["key"], encoded(header["value"])) for header in row.get("headers") or ())
    moment = row.get("timestamp")
    return key, encoded(row["value"]), headers, moment, partition


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    if "timestamp" in batch.schema.names:
        index = batch.schema.get_field_index("timestamp")
        kind = pa.timestamp("ms", tz=batch.schema.field(index).type.tz)
        batch = batch.set_column(index, "timestamp", batch.column(index).cast(kind).cast(pa.int64()))
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def seen(message: Any, started: int) -> tuple[Any, ...]:
    _, moment = message.timestamp()
    return (
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
        None if moment >= started else moment,
        message.partition(),
    )


def write(config: Kafka, *batches: pa.RecordBatch) -> None:
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), *batches)
    with committing(config, who) as committer:
        assert commit(committer, at, part) == COMMITTED


def test_generated_rows_are_read_as_they_were_written(kafka: KafkaService, fresh_topic: FreshName) -> None:
    """Nulls, empty and large values, all characters and bytes, slices, every type of column that is taken."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - shown if the test fails
    generator = Generator(random.Random(seed))
    batches = [generator.batch(ROWS // SCHEMAS) for _ in range(SCHEMAS)]
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), PARTITIONS, max_message_bytes=str(LARGEST))
    started = round((dt.datetime.now(dt.UTC) - EPOCH) / MILLISECOND) - 60_000
    limits = {"message.max.bytes": LARGEST}
    write(Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=60, options=limits), *batches)
    expected = Counter(wanted(row) for batch in batches for row in rows_of(batch))
    with Reader(kafka.bootstrap_servers, topic) as reader:
        messages = reader.until(ROWS)
    assert len(messages) == ROWS
    for message in messages:
        found = seen(message, started)
        # a row without a key and a partition may be anywhere
        known = found if expected[found] else (*found[:-1], None)
        expected[known] -= 1
        assert expected[known] >= 0, f"seed {seed}: not written: {str(found)[:300]}"


@pytest.mark.parametrize("headers", [True, False], ids=["each", "batch"])
def test_rows_are_as_those_of_sparks_own_sink(
    spark: SparkSession, kafka: KafkaService, fresh_topic: FreshName, *, headers: bool
) -> None:
    """The same keys on the same partitions, also empty ones; the same values and headers. It ignores timestamps."""
    frame = spark.range(10_000).selectExpr(
        "CAST(substring(sha2(CAST(id AS STRING), 256), 1, CAST(id % 41 AS INT)) AS BINARY) AS key",
        "IF(id % 7 = 0, NULL, CAST(CAST(id AS STRING) AS BINARY)) AS value",
        *(
            ["IF(id % 3 = 0, NULL, array(struct('h' AS key, CAST(hex(id) AS BINARY) AS value))) AS headers"]
            if headers
            else []
        ),
    )
    theirs, ours = (create_topic(kafka.bootstrap_servers, fresh_topic(), PARTITIONS) for _ in range(2))
    spark_options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": theirs, "includeHeaders": "true"}
    frame.write.format("kafka").options(**spark_options).save()
    write(Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=ours, timeout=60), *frame.toArrow().to_batches())
    found = []
    for topic in (theirs, ours):
        with Reader(kafka.bootstrap_servers, topic) as reader:
            found.append(Counter(seen(message, 1_600_000_000_000) for message in reader.until(10_000)))
    assert found[0] == found[1]
