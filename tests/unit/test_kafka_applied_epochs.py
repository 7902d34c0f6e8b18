"""Markers that have expired count neither as applied nor as lost."""

from __future__ import annotations

import time

import pytest

from epochsink.kafka.applied_epochs import DAY_SECONDS, Markers
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.sink import LastDone

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
