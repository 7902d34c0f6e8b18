"""A cluster that is down is told of in one error, not in hundreds of lines of the client's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from epochsink.errors import EpochsinkError
from epochsink.kafka import Kafka
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.producer import TransactionalProducer
from epochsink.sink import Chosen, Identity
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import free_port

if TYPE_CHECKING:
    from collections.abc import Callable


def begin_a_transaction(servers: str) -> None:
    TransactionalProducer({}, "epochsink.test", 60_000, 0.6, servers).begin()


def list_letters(servers: str) -> None:
    committer = OneSink.of(Kafka(bootstrap_servers=servers, topic="t", on_rejected="dead_letter", timeout=0.6))
    committer.open(Identity("q", "sink", 1))
    letters = committer.participant.operator().letters("sink")
    assert letters is not None
    letters.count(Chosen())


@pytest.mark.parametrize("act", [begin_a_transaction, list_letters])
def test_the_client_is_quiet_while_no_broker_answers(
    act: Callable[[str], None], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((NativeError, EpochsinkError)) as raised:
        act(f"127.0.0.1:{free_port()}")
    assert isinstance(raised.value, NativeError) or "could not be read" in str(raised.value)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")
