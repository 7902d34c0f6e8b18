"""What becomes of a row: key, value, headers, timestamp, topic and partition, as a consumer sees them."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from kafka.partitioner.default import murmur2
from kafka_kit import Reader, commit, create_topic, epoch, identity, prepare, rows, task

from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink_devkit.services import KafkaService


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> str:
    return create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=3)


def written(kafka: KafkaService, config: Kafka, topic: str, *batches: pa.RecordBatch) -> list[Any]:
    """Write the batches as one committed epoch and return the topic's messages."""
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), *batches)
    assert part["rows"] == sum(batch.num_rows for batch in batches)
    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        assert commit(committer, at, part) == COMMITTED
    finally:
        committer.close()
    with Reader(kafka.bootstrap_servers, topic) as reader:
        return reader.until(sum(batch.num_rows for batch in batches))


def config_for(kafka: KafkaService, topic: str | None, **settings: Any) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=20, **settings)


def test_keys_lie_on_the_partitions_that_the_java_client_gives_them(kafka: KafkaService, topic: str) -> None:
    keys = [f"key-{index}" for index in range(200)] + ["", "ключ", "x" * 1000]
    messages = written(kafka, config_for(kafka, topic), topic, rows(*keys, keys=keys))
    found = {message.key().decode(): message.partition() for message in messages}
    expected = {key: (murmur2(key.encode()) & 0x7FFFFFFF) % 3 for key in keys}
    assert found == expected


def test_rows_without_a_key_are_spread_and_all_arrive(kafka: KafkaService, topic: str) -> None:
    values = [str(number) for number in range(30_000)]
    messages = written(kafka, config_for(kafka, topic), topic, pa.record_batch({"value": pa.array(values)}))
    assert {message.key() for message in messages} == {None}
    assert sorted(int(message.value()) for message in messages) == list(range(30_000))


def test_null_empty_and_binary_values_are_told_apart(kafka: KafkaService, topic: str) -> None:
    batch = pa.record_batch(
        {
            "key": pa.array([b"null", b"empty", b"\x00\xff", b""], pa.binary()),
            "value": pa.array([None, b"", b"\x00\xfe\n", b"under the empty key"], pa.binary()),
        }
    )
    messages = written(kafka, config_for(kafka, topic), topic, batch)
    assert {message.key(): message.value() for message in messages} == {
        b"null": None,
        b"empty": b"",
        b"\x00\xff": b"\x00\xfe\n",
        b"": b"under the empty key",
    }


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()], ids=str)
def test_slices_of_every_type_of_bytes_are_written_as_they_are(
    kafka: KafkaService, topic: str, kind: pa.DataType
) -> None:
    values = [None if index % 7 == 0 else f"value {index}" for index in range(100)]
    whole = pa.record_batch({"key": pa.array([str(index) for index in range(100)]), "value": pa.array(values, kind)})
    messages = written(kafka, config_for(kafka, topic), topic, whole.slice(13, 40), whole.slice(90))
    found = {int(message.key()): message.value() and message.value().decode() for message in messages}
    assert found == {index: values[index] for index in [*range(13, 53), *range(90, 100)]}


def test_only_nulls_make_tombstones(kafka: KafkaService, topic: str) -> None:
    batch = pa.record_batch({"key": pa.array(["a", "b"]), "value": pa.nulls(2)})
    messages = written(kafka, config_for(kafka, topic), topic, batch)
    assert {message.key(): message.value() for message in messages} == {b"a": None, b"b": None}


def test_headers_and_timestamps_arrive(kafka: KafkaService, topic: str) -> None:
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    moment = dt.datetime(2020, 2, 3, 4, 5, 6, 789_000, tzinfo=dt.UTC)
    batch = rows(
        "one",
        "two",
        "three",
        headers=pa.array(
            [
                [{"key": "trace", "value": b"\x00\x01"}, {"key": "trace", "value": b"again"}],
                [{"key": "empty", "value": b""}, {"key": "nothing", "value": None}],
                None,
            ],
            pa.list_(header),
        ),
        timestamp=pa.array([moment, moment, None], pa.timestamp("us", tz="UTC")),
    )
    before = dt.datetime.now(dt.UTC).timestamp() * 1000 - 60_000
    found = {message.value(): message for message in written(kafka, config_for(kafka, topic), topic, batch)}
    assert found[b"one"].headers() == [("trace", b"\x00\x01"), ("trace", b"again")]
    assert found[b"two"].headers() == [("empty", b""), ("nothing", None)]
    assert found[b"three"].headers() is None
    assert found[b"one"].timestamp()[1] == 1_580_702_706_789
    assert found[b"three"].timestamp()[1] > before


def test_the_partition_column_goes_before_the_key_and_null_leaves_it_to_the_key(
    kafka: KafkaService, topic: str
) -> None:
    batch = rows("a", "b", "c", keys=["k", "k", "k"], partition=pa.array([0, 2, None], pa.int32()))
    by_key = (murmur2(b"k") & 0x7FFFFFFF) % 3
    found = {message.value(): message.partition() for message in written(kafka, config_for(kafka, topic), topic, batch)}
    assert found == {b"a": 0, b"b": 2, b"c": by_key}


def test_each_row_may_name_its_topic_and_one_commit_shows_them_all(kafka: KafkaService, fresh_topic: FreshName) -> None:
    first, second = (create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=1) for _ in range(2))
    batch = rows("a", "b", "c", "d", topic=pa.array([first, second, second, first]))
    config = config_for(kafka, None)
    who, at = identity(), epoch(3)
    part = prepare(config, task(who, at), batch)
    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        assert commit(committer, at, part) == COMMITTED
        assert committer.newest() == 3
    finally:
        committer.close()
    for topic, expected in ((first, [b"a", b"d"]), (second, [b"b", b"c"])):
        with Reader(kafka.bootstrap_servers, topic) as reader:
            assert [message.value() for message in reader.until(2)] == expected


def test_the_order_of_a_task_is_the_order_in_a_partition(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=1)
    # a queue so short that the client has to wait for the broker again and again
    config = config_for(kafka, topic, options={"queue.buffering.max.messages": 300, "compression.type": "lz4"})
    batches = [rows(*[str(number) for number in range(start, start + 2500)]) for start in (0, 2500, 5000)]
    messages = written(kafka, config, topic, *batches)
    assert [int(message.value()) for message in messages] == list(range(7500))
