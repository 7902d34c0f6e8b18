"""The pipeline is killed while it applies epochs, at one bulk request after another, and nothing is lost or doubled.

One growing pipeline writes two indices: one appends, so that a row that comes twice would show, the other upserts and
deletes. Each start goes on with what the crash before it left half applied, and dies a little later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from http_proxy import Proxy
from indices import Hold, two_indices

from epochsink.failpoints import POINTS

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService, KafkaService

ROWS_FED: Final = 30
"""Rows added to each of the two source partitions before a start: one epoch."""

CRASHES: Final = (
    "elasticsearch.bulk.between",
    "elasticsearch.bulk.between:8",  # in the recovery: the log is whole, the state is not
    "elasticsearch.marker.before",  # in the recovery: the state's
    "elasticsearch.bulk.between:7",  # in the next epoch's log
    "elasticsearch.bulk.between:17",  # in the next epoch's state: the first of its four
    "coordinator.commit.between:3",  # the next epoch's log is marked, the state has nothing
)
"""An epoch takes ten requests, six for the log and then four for the state; those of the recovery count too."""

pytestmark = pytest.mark.timeout(1800)


def test_every_point_that_elasticsearch_has_is_among_these() -> None:
    # an operator's retry of dead letters dies at its own in test_elasticsearch_retry.py
    mine = {
        point
        for point in POINTS
        if point.startswith("elasticsearch.") and not point.startswith("elasticsearch.letters.")
    }
    assert mine <= {crash.partition(":")[0] for crash in CRASHES}


def test_a_pipeline_killed_in_the_middle_of_its_applies_is_exactly_once(
    tmp_path: Path, kafka: KafkaService, elasticsearch: ElasticsearchService, fresh_topic: FreshName
) -> None:
    url = elasticsearch.url
    with two_indices(tmp_path, kafka, fresh_topic("source"), url=url, server=url) as harness:
        harness.feed(ROWS_FED)
        harness.feed_and_crash_at(CRASHES, ROWS_FED)
        harness.drain()
        report = harness.report()
    assert report.clean, str(report)
    assert min(report.windows.values()) > 1, "no crash left an epoch in part for as long as a start takes"


def test_a_request_of_a_killed_driver_that_arrives_two_epochs_later_changes_nothing(
    tmp_path: Path, kafka: KafkaService, elasticsearch: ElasticsearchService, fresh_topic: FreshName
) -> None:
    """Rows go to three indices each, by their keys."""
    source, server = fresh_topic("source"), elasticsearch.url
    options = {"routing": "key", "parts": "pmod(hash(key), 3)"}
    with (
        Proxy(server, lambda _: None) as proxy,
        two_indices(tmp_path, kafka, source, url=proxy.url, server=server, **options) as harness,
    ):
        hold = proxy.behave = Hold(proxy, f"state-{source}", epoch=0)
        harness.feed(ROWS_FED)
        with harness.start() as process:
            harness.wait_for(process, hold.held.is_set, "a part of the first epoch")
            harness.log.write("killed", what="driver", pid=process.driver)
        harness.feed(2 * ROWS_FED)
        harness.drain()
        hold.released.set()
        hold.answered.wait(60)
        report = harness.report()
    assert hold.answer is not None
    assert b'"errors":true' in hold.answer.body, "the versions had to refuse what came late"
    assert report.clean, str(report)
