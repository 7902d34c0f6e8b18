"""What the ledger keeps of a Kafka transaction."""

from __future__ import annotations

import json

import pytest

from epochsink.errors import LedgerCorrupt
from epochsink.kafka.committable import VERSION, KafkaCommittable, Transaction, WrittenPartition

PART = KafkaCommittable(
    transaction=Transaction("epochsink.a.g1.s3.p0.a7", 7, 3),
    partition=3,
    task="f" * 32,
    rows=9,
    prepared_at=1_700_000_000,
    topics={"orders": "a" * 32, "returns": "b" * 32},
    kept_in_topic=True,
    places=(
        WrittenPartition("orders", 0, 10, 14, 2),
        WrittenPartition("orders", 11, 1 << 40, 1 << 41, 0),
        WrittenPartition("returns", 0, 0, 5, 1),
    ),
)


def test_a_committable_survives_the_ledger() -> None:
    recorded = json.loads(json.dumps(PART.to_json()))
    assert recorded == PART.to_json()
    assert KafkaCommittable.from_json(recorded) == PART


@pytest.mark.parametrize("version", [VERSION + 1, 4, "x", None])
def test_another_version_is_refused_by_its_name(version: object) -> None:
    with pytest.raises(LedgerCorrupt, match=f"version {version!r} .* reads version {VERSION}"):
        KafkaCommittable.from_json(PART.to_json() | {"version": version})


@pytest.mark.parametrize(
    "damage", [{"producer_id": None}, {"partition": "first"}, {"places": {"orders": [[1]]}}, {"places": []}], ids=str
)
def test_what_cannot_be_read_is_named(damage: dict[str, object]) -> None:
    with pytest.raises(LedgerCorrupt, match="Kafka committable"):
        KafkaCommittable.from_json(PART.to_json() | damage)


@pytest.mark.parametrize("missing", sorted(PART.to_json().keys() - {"version"}))
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(LedgerCorrupt, match=missing):
        KafkaCommittable.from_json({name: value for name, value in PART.to_json().items() if name != missing})
