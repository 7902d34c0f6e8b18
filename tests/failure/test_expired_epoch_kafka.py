"""Epochs whose Kafka transactions expired while the job was down are delivered once, and in the order of their keys."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import pytest
from kafka_rig import KafkaRig, pipeline_into_kafka

from epochsink_devkit.history.readers.reader import TargetUnreachable

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka

TRANSACTION_SECONDS: Final = 20
EXPIRY_SECONDS: Final = 120.0

pytestmark = pytest.mark.timeout(900)


def nothing_is_open(rig: KafkaRig) -> bool:
    """Return whether the broker says so; just after its start it may not know yet."""
    try:
        return not rig.reader.leftovers()
    except TargetUnreachable:
        return False


def wait_until_expired(rig: KafkaRig) -> None:
    """Wait until the broker has aborted every open transaction."""
    deadline = time.monotonic() + EXPIRY_SECONDS
    while not nothing_is_open(rig):
        assert time.monotonic() < deadline, "the broker did not abort the transactions"
        time.sleep(0.5)


@pytest.mark.parametrize("spool", [None, True], ids=["kept in the topic", "kept in the spool"])
def test_epochs_that_expired_while_the_job_was_down_are_delivered_once_and_before_later_ones(
    tmp_path: Path, private_kafka: PrivateKafka, *, spool: bool | None
) -> None:
    """One expires before its decision; of another one transaction is committed, and the broker dies, too."""
    broker = private_kafka(**{"transaction.abort.timed.out.transaction.cleanup.interval.ms": 500})
    with pipeline_into_kafka(tmp_path, broker, transaction_timeout=TRANSACTION_SECONDS, spool=spool) as rig:
        rig.restart_with("coordinator.record.after:2")
        assert rig.reader.leftovers(), "the recorded epoch's transactions have to be open at first"
        # so few rows are in the record itself
        entries = (rig.harness.folder / "checkpoint" / "epochsink" / "ledger").iterdir()
        carried = [entry for entry in entries if re.search(rb'"carried": "[^"]', entry.read_bytes())]
        assert bool(carried) is bool(spool)
        wait_until_expired(rig)

        # each of the expired two is asked for twice, before it is prepared again and after; then comes a new epoch
        rig.restart_with("kafka.commit.between:5")
        assert rig.reader.leftovers(), "the second transaction of the epoch has to be open at first"
        rig.kill_broker()
        wait_until_expired(rig)

        rig.is_clean()
