"""Elasticsearch dies while epochs are applied, and a driver sleeps while another one overtakes it."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from http_proxy import Lost, Proxy, Seen
from indices import RECOVERS_LATE, Hold, epoch_of, two_indices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fix_services import FreshName, PrivateElasticsearch
    from processes import PipelineProcess

    from epochsink_devkit.history import HistoryLog
    from epochsink_devkit.services import ElasticsearchService, KafkaService

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Strike:
    """The server dies at this bulk request of an epoch. ``applied``: after it has applied it."""

    epoch: int
    request: int
    applied: bool


class Outages:
    """What a proxy does: kill the server at each strike, lose the answer, and let the server come back."""

    def __init__(self, proxy: Proxy, server: ElasticsearchService, log: HistoryLog, strikes: Sequence[Strike]) -> None:
        self._proxy = proxy
        self._server = server
        self._log = log
        self._requests: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.left = list(strikes)

    def __call__(self, seen: Seen) -> Lost | None:
        """Strike when it is time."""
        strike = self._due(seen)
        if strike is None:
            return None
        if strike.applied:
            self._proxy.forward(seen)
        self._log.write("killed", what=f"Elasticsearch at {strike}", pid=self._server.pid)
        self._server.kill()
        self._server.start()
        return Lost(0)

    def _due(self, seen: Seen) -> Strike | None:
        epoch = epoch_of(seen) if seen.is_bulk else None
        if epoch is None:
            return None
        with self._lock:
            self._requests[epoch] += 1
            if self.left and (epoch, self._requests[epoch]) == (self.left[0].epoch, self.left[0].request):
                return self.left.pop(0)
        return None


def test_a_server_that_dies_while_epochs_are_applied_stops_nothing_and_loses_nothing(
    tmp_path: Path, kafka: KafkaService, private_elasticsearch: PrivateElasticsearch, fresh_topic: FreshName
) -> None:
    """Killed between the record and the first request of an epoch, and in the middle of another with the reply lost.

    It answers for a while before it knows its indices, and is read all the time.
    """
    server = private_elasticsearch(**RECOVERS_LATE)
    with (
        Proxy(server.url, lambda _: None) as proxy,
        two_indices(tmp_path, kafka, fresh_topic("source"), url=proxy.url, server=server.url) as harness,
    ):
        strikes = [Strike(epoch=1, request=1, applied=False), Strike(epoch=3, request=8, applied=True)]
        outages = proxy.behave = Outages(proxy, server, harness.log, strikes)
        harness.feed(150)
        harness.drain()
        report = harness.report()
    assert outages.left == []
    assert harness.runs == 1, "the pipeline was to go on by itself when the server is back"
    assert report.clean, str(report)


def send(process: PipelineProcess, signum: signal.Signals) -> None:
    """Send a signal to a run's driver, and to its JVM."""
    for pid in filter(None, (process.driver, process.jvm())):
        os.kill(pid, signum)


def test_a_driver_that_wakes_up_after_another_went_on_changes_nothing_and_is_told(
    tmp_path: Path, kafka: KafkaService, elasticsearch: ElasticsearchService, fresh_topic: FreshName
) -> None:
    """The first stops in the middle of an apply; what it had sent arrives when the second is two epochs ahead."""
    source = fresh_topic("source")
    with (
        Proxy(elasticsearch.url, lambda _: None) as proxy,
        two_indices(tmp_path, kafka, source, url=proxy.url, server=elasticsearch.url) as harness,
    ):
        hold = proxy.behave = Hold(proxy, f"state-{source}", epoch=1)
        harness.feed(60)
        first, output = harness.start(), harness.output
        with first:
            harness.wait_for(first, hold.held.is_set, "the second epoch's request")
            send(first, signal.SIGSTOP)
            harness.log.write("killed", what="paused", pid=first.driver)
            harness.feed(60)
            harness.drain()
            assert harness.runs == 2
            send(first, signal.SIGCONT)
            hold.released.set()
            harness.end(first)
        report = harness.report()
    assert hold.answer is not None
    assert b'"errors":true' in hold.answer.body, "the versions had to refuse what came late"
    assert first.exit_code not in {0, None}
    assert "Fenced" in output.read_text(), output.read_text()[-5000:]
    assert report.clean, str(report)
