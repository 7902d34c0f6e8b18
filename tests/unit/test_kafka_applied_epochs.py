"""Markers that have expired count neither as applied nor as lost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from epochsink.kafka.applied_epochs import DAY_SECONDS, Markers
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.errors import Unreachable
from epochsink.sink import LastDone, Mark

HOUR = 3600


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> Markers:
    """Return the markers of a cluster that does not say how long it keeps offsets."""
    monkeypatch.setattr(Cluster, "broker_setting", lambda *_: None)
    return Markers(Cluster("broker:9092", {}, 1.0), "0" * 20)


def done(hours_ago: int) -> LastDone:
    part = KafkaCommittable(
        transaction=Transaction("epochsink.x", 7, 3),
        partition=0,
        task="b" * 32,
        rows=1,
        prepared_at=int(time.time()) - hours_ago * HOUR,
        topics={"orders": "f" * 32},
    )
    return LastDone(5, "a" * 32, (part.to_json(),))


def test_without_a_right_to_ask_offsets_are_taken_to_expire_after_a_day(markers: Markers) -> None:
    """Taken to be kept for ever, one that has expired would say that the cluster was set back."""
    assert markers.retention() == DAY_SECONDS
    assert markers.unexpired(done(hours_ago=25), {}).parts == ()


def test_a_marker_that_cannot_have_expired_must_be_there(markers: Markers) -> None:
    recent = done(hours_ago=23)
    assert markers.unexpired(recent, {}) == recent


def test_a_marker_that_is_there_is_compared_whatever_its_age(markers: Markers) -> None:
    """Of two parts, one has lost its marker, by age; the other one's is there, of an older epoch."""
    old = done(hours_ago=25)
    (first,) = old.parts
    both = LastDone(old.epoch, old.attempt, (first, {**first, "partition": 1}))
    (kept, _) = sorted(markers.marks_of(both))
    assert markers.unexpired(both, {kept: Mark(3, "c" * 32)}).parts == (first,)


def answered(*offsets: int, error_code: int = 0, code: int = 0) -> SimpleNamespace:
    """Return the answer for a group with offsets; ``code`` is the error of one more offset."""
    partitions = [SimpleNamespace(committed_offset=offset, metadata="a", error_code=0) for offset in offsets]
    if code:
        partitions.append(SimpleNamespace(committed_offset=-1, metadata="", error_code=code))
    topics = [SimpleNamespace(name="orders", partitions=partitions)]
    return SimpleNamespace(groups=[SimpleNamespace(group_id="g", error_code=error_code, topics=topics)])


def told(monkeypatch: pytest.MonkeyPatch, answer: SimpleNamespace) -> dict[str, Mark]:
    monkeypatch.setattr(Cluster, "ask_coordinators", lambda *_: [answer])
    return Markers(Cluster("broker:9092", {}, 0.1), "0" * 20).read(["g"], time.monotonic() + 0.1)


def test_of_the_offsets_under_several_topics_the_largest_is_the_newest_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, answered(3, 7, -1, 5)) == {"g": Mark(7, "a")}
    assert told(monkeypatch, answered(-1)) == {}


def test_a_marker_that_is_not_settled_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On brokers before 4.0 the commit may be complete, and its marker not shown yet."""
    answers = [answered(3), answered(code=88), answered(3), answered(7)]
    asked: list[tuple[bool, list[str] | None]] = []

    def ask(_: Cluster, kind: object, groups: list[str], request: Any) -> list[SimpleNamespace]:
        del kind
        made = request(groups)
        [group] = made.groups
        asked.append((made.require_stable, None if group.topics is None else [each.name for each in group.topics]))
        return [answers.pop(0)]

    monkeypatch.setattr(Cluster, "ask_coordinators", ask)
    markers = Markers(Cluster("broker:9092", {}, 5.0), "0" * 20)
    assert markers.read(["g"], time.monotonic() + 5, settled_in=["orders"]) == {"g": Mark(7, "a")}
    assert asked == [(True, None), (True, ["orders"])] * 2


def test_a_group_that_could_not_be_read_is_not_one_without_a_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a marker, an epoch that was committed would be written again."""
    with pytest.raises(Unreachable):
        told(monkeypatch, answered(error_code=16))


def test_what_an_answer_leaves_out_is_not_a_group_without_a_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreachable):
        told(monkeypatch, SimpleNamespace(groups=[]))
