"""Requests that arrive in part, answers that never do, and a driver that sleeps for longer than deletes are kept."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import pytest
from elasticsearch_requests import OneByOne, SmallRequests
from elasticsearch_rig import Rig, rendered
from http_proxy import Answer, Lost, Proxy, Seen
from indices import RECOVERS_LATE

from epochsink.elasticsearch import Elasticsearch, applied_epochs, config
from epochsink.elasticsearch.connection import connect
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticsearch_rig import Document
    from fix_services import FreshName, PrivateElasticsearch

    from epochsink_devkit.services import ElasticsearchService

DEADLINE = 60.0
OLD: list[Document] = [(f"d{number}", {"n": number, "state": "old"}) for number in range(60)]
NEW: list[Document] = [
    (f"d{number}", None if number % 3 == 0 else {"n": number, "state": "new"}) for number in range(60)
]
KEPT = {name: document for name, document in NEW if document is not None}


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Arguments of a sink that upserts and deletes; small requests, so that each epoch has many."""
    settings = {"number_of_shards": 2, "number_of_replicas": 0}
    common = {"key": "id", "delete_when": "gone", "timeout": 30.0}
    return {"hosts": elasticsearch.url, "index": fresh_index(), "create": settings, **common}


@pytest.fixture
def rig(options: dict[str, Any]) -> Iterator[Rig]:
    made = Rig.joining(SmallRequests(**options))
    yield made
    made.close()


def behind(
    rig: Rig, options: dict[str, Any], proxy: Proxy, kind: type[Elasticsearch] = SmallRequests, **changed: Any
) -> Rig:
    """Return the same sink, reaching the server through a proxy."""
    return Rig(kind(**{**options, "hosts": proxy.url, **changed}), rig.identity)


def half_applied(proxy: Proxy, seen: Seen) -> Lost:
    """Let the server apply every second operation."""
    proxy.forward(seen.only(seen.operations[::2]))
    return Lost(0)


def cut(_proxy: Proxy, _seen: Seen) -> Lost:
    """Let the server have the first half of the bytes."""
    return Lost(0.5)


@pytest.mark.parametrize("misfortune", [half_applied, cut])
def test_a_request_of_which_the_server_got_a_part_is_sent_again(
    rig: Rig, options: dict[str, Any], misfortune: Callable[[Proxy, Seen], Lost]
) -> None:
    """Each request of the epoch, updates and deletes, arrives in part at first."""
    rig.apply(0, [rendered(OLD)])
    struck: set[bytes] = set()

    def behave(seen: Seen) -> Lost | None:
        if not seen.is_bulk or seen.body in struck:
            return None
        struck.add(seen.body)
        return misfortune(proxy, seen)

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, options, proxy)) as unlucky:
        unlucky.apply(1, [rendered(NEW)])
    assert len(struck) > 5
    assert rig.stored() == KEPT
    assert rig.committer.newest() == 1


def test_the_answer_to_every_request_of_a_commit_may_be_lost(rig: Rig, options: dict[str, Any]) -> None:
    """Reading marker and claim, claiming, looking at the index, bulk, refresh, writing the marker: each in vain."""
    rig.apply(0, [rendered(OLD)])
    lost: list[tuple[str, str, bytes]] = []

    def behave(seen: Seen) -> Lost | None:
        request = (seen.method, seen.path, b"" if "markers" in seen.path else seen.body)
        if request in lost:
            return None
        lost.append(request)
        return Lost()

    prepared = rig.prepare(1, [rendered(NEW)])
    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, options, proxy, refresh=True)) as unlucky:
        assert unlucky.commit(prepared).outcome is Outcome.COMMITTED
    assert sum("/epochsink-markers/" in path for _, path, _ in lost) == 4, "marker and claim are read and written"
    assert sum("_refresh" in path for _, path, _ in lost) == 1
    assert len(proxy.bulks) > 10
    assert rig.stored() == KEPT
    assert rig.committer.newest() == 1


def test_a_server_that_restarts_while_an_epoch_is_made_searchable_is_waited_for(
    private_elasticsearch: PrivateElasticsearch, options: dict[str, Any]
) -> None:
    """Just started, it answers a refresh with 404 before it knows its indices."""
    server = private_elasticsearch(**RECOVERS_LATE)
    hidden = {"number_of_shards": 2, "number_of_replicas": 0, "refresh_interval": "-1"}
    patient = {**options, "timeout": 240.0}
    sink = SmallRequests(**{**patient, "hosts": server.url, "create": hidden})
    refused: list[Answer] = []

    def behave(seen: Seen) -> Answer | Lost | None:
        if "_refresh" not in seen.path or started:
            return None
        server.kill()
        started.append(thread.submit(server.start))
        while (answer := forwarded(proxy, seen)) is None:
            assert not started[0].done(), started[0].result()
        refused.append(answer)
        return answer

    started: list[Future[ElasticsearchService]] = []
    with closing(Rig.joining(sink)) as rig, ThreadPoolExecutor(1) as thread:
        prepared = rig.prepare(0, [rendered(NEW)])
        with Proxy(server.url, behave) as proxy, closing(behind(rig, patient, proxy, refresh=True)) as restarting:
            assert restarting.commit(prepared).outcome is Outcome.COMMITTED
        started[0].result()
        with closing(connect(sink)) as client:
            assert client.count(index=sink.index)["count"] == len(KEPT)
    assert refused[0].status == 404 or b'"successful":0' in refused[0].body, "the server was to know no index"


def forwarded(proxy: Proxy, seen: Seen) -> Answer | None:
    """Return the server's answer, None while it does not answer at all."""
    try:
        return proxy.forward(seen)
    except OSError:
        time.sleep(0.01)
        return None


def test_a_driver_that_slept_beyond_gc_deletes_brings_nothing_back(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has forgotten the deleted documents' versions, so it would take a stale write: the marker tells."""
    monkeypatch.setattr(applied_epochs, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(config, "LEAST_GC_DELETES", 0.0)
    options |= {"gc_deletes": "1ms", "create": {"number_of_shards": 1, "number_of_replicas": 0}}
    asleep, awake = threading.Event(), threading.Event()

    def behave(seen: Seen) -> Answer | None:
        if not seen.is_bulk or asleep.is_set():
            return None
        answer = proxy.forward(seen)
        asleep.set()
        awake.wait(DEADLINE)
        return answer

    with closing(Rig.joining(SmallRequests(**options))) as rig:
        first = rig.prepare(0, [rendered([*OLD, ("last", {"n": 0})])])
        with (
            Proxy(options["hosts"], behave) as proxy,
            closing(behind(rig, options, proxy, OneByOne)) as sleeper,
            ThreadPoolExecutor(1) as thread,
        ):
            under_way = thread.submit(sleeper.commit, first)
            assert asleep.wait(DEADLINE)
            assert rig.commit(first).outcome is Outcome.COMMITTED
            rig.apply(1, [rendered([(name, None) for name, _ in OLD])])
            rig.apply(2, [rendered([("last", None)])])
            wait_until_forgotten(rig, "last")
            awake.set()
            # a later epoch is applied: the caller asks its ledger who did that
            assert under_way.result(DEADLINE).outcome is Outcome.UNKNOWN
            assert len(proxy.bulks) == 1
        assert rig.commit(first).outcome is Outcome.UNKNOWN
        assert rig.stored() == {"last": {"n": -1}}


def wait_until_forgotten(rig: Rig, document_id: str) -> None:
    """Write a deleted document as a writer that does not look at the marker would, until the server takes it."""
    stale = {"version": rig.identity.origin["base"], "version_type": "external_gte"}
    deadline = time.monotonic() + DEADLINE
    with closing(connect(rig.sink)) as client:
        while True:
            try:
                client.index(index=rig.sink.index, id=document_id, document={"n": -1}, **stale)
            except vendor.ConflictError:
                assert time.monotonic() < deadline, "the server forgets no deletes"
                client.indices.refresh(index=rig.sink.index)
                time.sleep(0.05)
            else:
                return


def test_a_node_with_little_memory_for_indexing_gets_requests_that_it_takes(
    private_elasticsearch: PrivateElasticsearch, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It answers 429 to every request above its limit, however often that is sent again, and also to two at once."""
    server = private_elasticsearch(**{"indexing_pressure.memory.limit": "200kb"})
    documents = [(f"{number:05}", {"n": number, "text": "x" * 400}) for number in range(4_000)]
    with closing(Rig.joining(Elasticsearch(**{**options, "hosts": server.url, "timeout": 30.0}))) as rig:
        assert rig.sink.bulk_bytes > 10 * 200_000
        for number in range(2):
            rig.apply(number, [rendered(documents[2_000 * number : 2_000 * (number + 1)])])
        client = connect(rig.sink)
        with closing(client):
            client.indices.refresh(index=rig.sink.index)
            assert client.count(index=rig.sink.index)["count"] == len(documents)
            (stats,) = client.nodes.stats(metric="indexing_pressure")["nodes"].values()
    assert stats["indexing_pressure"]["memory"]["total"]["coordinating_rejections"] > 0
    told = [record.message for record in caplog.records if record.name == "epochsink"]
    assert "epoch 0" in told[0]
    assert "the server answered 429 to" in told[0]
    assert "1 at once of up to" in told[0]
