"""What the ledger keeps of a Kafka transaction, in this version and in older ones."""

from __future__ import annotations

import dataclasses
import json

import pytest

from epochsink.errors import LedgerCorrupt
from epochsink.kafka.committable import VERSION, KafkaCommittable
from epochsink.kafka.transactional_id import Transaction

FIRST = {
    "transactional_id": "epochsink.a.g1.s3.p0.a7",
    "producer_id": 7,
    "producer_epoch": 3,
    "slot": 3,
    "task": "f" * 32,
    "rows": 9,
    "prepared_at": 1_700_000_000,
}
"""As recorded before committables bore a version."""


def test_a_committable_survives_the_ledger() -> None:
    part = dataclasses.replace(KafkaCommittable.from_json(FIRST), version=VERSION)
    assert KafkaCommittable.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_a_committable_tells_from_where_in_its_topic_the_rows_are_kept() -> None:
    part = dataclasses.replace(KafkaCommittable.from_json(FIRST), version=VERSION, log_from=(10, 0, 1 << 40))
    assert KafkaCommittable.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_those_of_older_versions_have_their_rows_in_the_spool() -> None:
    assert all(KafkaCommittable.from_json(FIRST | {"version": n, "partition": 3}).log_from == () for n in (1, 2, 3))


def test_a_committable_of_the_first_version_is_read() -> None:
    part = KafkaCommittable.from_json(FIRST)
    assert part.transaction == Transaction("epochsink.a.g1.s3.p0.a7", 7, 3)
    assert (part.partition, part.task, part.rows, part.prepared_at) == (3, "f" * 32, 9, 1_700_000_000)


@pytest.mark.parametrize(("version", "joint"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_committable_says_where_its_marker_stands_whoever_records_it_again(*, version: int, joint: bool) -> None:
    part = KafkaCommittable.from_json(FIRST | {"version": version, "partition": 3})
    assert part.has_joint_marker is joint
    assert KafkaCommittable.from_json(part.to_json()).has_joint_marker is joint


@pytest.mark.parametrize("damage", [{"version": 99}, {"version": "x"}, {"producer_id": None}, {"slot": "first"}])
def test_what_cannot_be_read_is_named(damage: dict[str, object]) -> None:
    with pytest.raises(LedgerCorrupt, match="Kafka committable"):
        KafkaCommittable.from_json(FIRST | damage)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(LedgerCorrupt, match="task"):
        KafkaCommittable.from_json({name: value for name, value in FIRST.items() if name != "task"})
