"""Which topics keep the rows of an epoch themselves; what is not known speaks for a copy."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from epochsink.kafka import Kafka
from epochsink.kafka.rows_in_log import where, why_not

DAY_MS = 86_400_000
DEFAULTS = {
    "cleanup.policy": "delete",
    "retention.ms": str(7 * DAY_MS),
    "retention.bytes": "-1",
    "message.timestamp.type": "CreateTime",
    "unclean.leader.election.enable": "false",
}
ROWS = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
DATED = pa.schema([("value", pa.string()), ("timestamp", pa.timestamp("us", "UTC"))])


def sink(**settings: Any) -> Kafka:
    return Kafka(bootstrap_servers="broker:9092", **({"topic": "orders"} | settings))


@pytest.mark.parametrize(
    ("topics", "schema"),
    [
        ({}, ROWS),
        ({"retention.ms": str(3 * DAY_MS)}, ROWS),
        ({"retention.ms": "-1"}, ROWS),
        ({"retention.ms": "-1"}, DATED),
        ({"message.timestamp.type": "LogAppendTime"}, DATED),
        ({"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": "1"}, ROWS),
        ({"message.timestamp.before.max.ms": str(2**63 - 1)}, ROWS),
    ],
)
def test_a_topic_that_deletes_by_age_alone_keeps_the_rows(topics: dict[str, str], schema: pa.Schema) -> None:
    assert why_not(sink(), DEFAULTS | topics, schema) is None
    assert where(sink(), DEFAULTS | topics, schema).startswith("in the topic itself")


@pytest.mark.parametrize(
    ("settings", "topics", "schema", "why"),
    [
        ({}, {"cleanup.policy": "compact"}, ROWS, "cleanup.policy = compact"),
        ({}, {"cleanup.policy": "compact,delete"}, ROWS, "cleanup.policy = compact,delete"),
        ({}, {"retention.ms": str(3 * DAY_MS - 1)}, ROWS, "less than 72 hours"),
        ({}, {"retention.bytes": "1000000000000"}, ROWS, "other rows may soon take their place"),
        ({}, {"unclean.leader.election.enable": "true"}, ROWS, "unclean.leader.election.enable = true"),
        ({}, {"message.timestamp.before.max.ms": str(DAY_MS)}, ROWS, f"message.timestamp.before.max.ms = {DAY_MS}"),
        ({}, {"message.timestamp.difference.max.ms": "1"}, ROWS, "message.timestamp.difference.max.ms = 1"),
        ({}, {}, DATED, "bring their own timestamps"),
        ({"timestamp": "at"}, {}, ROWS, "bring their own timestamps"),
        ({"topic": None, "topic_column": "'orders'"}, {}, ROWS, "each row names its topic"),
        ({"spool": True}, {}, ROWS, "spool=True"),
    ],
)
def test_a_copy_is_kept_where_the_topic_may_not_keep_the_rows(
    settings: dict[str, Any], topics: dict[str, str], schema: pa.Schema, why: str
) -> None:
    assert why in str(why_not(sink(**settings), DEFAULTS | topics, schema))
    assert where(sink(**settings), DEFAULTS | topics, schema).startswith("in the spool")


@pytest.mark.parametrize("unknown", DEFAULTS)
def test_what_the_brokers_do_not_tell_speaks_for_a_copy(unknown: str) -> None:
    told = {name: value for name, value in DEFAULTS.items() if name != unknown}
    assert why_not(sink(), told, DATED)
    assert why_not(sink(), {}, ROWS)


def test_without_a_spool_nothing_is_kept() -> None:
    assert where(sink(spool=False), DEFAULTS, ROWS).startswith("nowhere")
