"""An epoch whose Kafka transaction expired while the job was down is delivered once, and in the order of its keys."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest
from harness import Harness, make_topic

from epochsink.testing import Target
from epochsink.testing.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import FreshName, PrivateKafka

TRANSACTION_SECONDS: Final = 20
EXPIRY_SECONDS: Final = 120.0

pytestmark = pytest.mark.timeout(900)


def test_an_epoch_that_expired_before_its_decision_is_delivered_once_and_before_later_ones(
    tmp_path: Path, private_kafka: PrivateKafka, fresh_topic: FreshName
) -> None:
    kafka = private_kafka(**{"transaction.abort.timed.out.transaction.cleanup.interval.ms": 500})
    topic = fresh_topic("sink")
    make_topic(kafka.bootstrap_servers, topic)
    sink = {
        "kind": "Kafka",
        "bootstrap_servers": kafka.bootstrap_servers,
        "topic": topic,
        "key": "cast(key AS string)",
        "transaction_timeout": TRANSACTION_SECONDS,
    }
    reader = KafkaReader(kafka.bootstrap_servers, topic)
    with Harness(tmp_path, kafka, fresh_topic("source"), sinks={"topic": sink}) as harness:
        harness.read(Target("topic", atomic=False, lag=2.0), KafkaReader(kafka.bootstrap_servers, topic))
        harness.feed(60)
        harness.crash_at("coordinator.record.after:2")
        assert reader.leftovers(), "the recorded epoch's transactions have to be open at first"
        deadline = time.monotonic() + EXPIRY_SECONDS
        while reader.leftovers():
            assert time.monotonic() < deadline, "the broker did not abort the transactions"
            time.sleep(0.5)
        harness.feed(120)
        harness.drain()
        report = harness.report()
    assert report.clean, str(report)
