"""Settings on which durability or meaning rest are changed under a running query: it stops before it relies on them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from elasticsearch_requests import OneByOne
from elasticsearch_rig import SCHEMA, Rig, rendered

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.applied_epochs import INDEX as MARKERS
from epochsink.elasticsearch.connection import connect
from epochsink.errors import EpochsinkError, OutcomeUnknown, PrepareFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from elasticsearch_rig import Document
    from fix_services import FreshName, PrivateElasticsearch

    from epochsink_devkit.services import ElasticsearchService

FIRST: list[Document] = [(f"a{number}", {"n": number}) for number in range(100)]
SECOND: list[Document] = [(f"b{number}", {"n": number}) for number in range(200)]
# so long that no document of the test is written to disk by the clock
ASYNCHRONOUS = {"index.translog.durability": "async", "index.translog.sync_interval": "1h"}
REQUEST = {"index.translog.durability": "request"}
HINT = 'PUT /{}/_settings {{"{}": "{}"}}, then start the query again'


@pytest.fixture
def sink(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> Elasticsearch:
    settings = {"number_of_shards": 1, "number_of_replicas": 0, "index.refresh_interval": "-1"}
    return OneByOne(
        elasticsearch.url,
        index=fresh_index(),
        key="id",
        delete_when="gone",
        create=settings,
    )


@pytest.fixture
def client(sink: Elasticsearch) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(sink)) as connected:
        yield connected


def test_an_index_that_forgets_what_it_acknowledges_is_not_relied_on_and_its_node_may_crash(
    private_elasticsearch: PrivateElasticsearch, fresh_index: FreshName
) -> None:
    """300 documents, 200 of which a node with such an index would have forgotten after the epoch was done."""
    server = private_elasticsearch()
    sink = Elasticsearch(server.url, index=fresh_index(), key="id", create={"number_of_replicas": 0})
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered(FIRST)])
        prepared = rig.prepare(1, [rendered(SECOND)])
        change(rig, sink.index, ASYNCHRONOUS)
        with pytest.raises(OutcomeUnknown, match=r"durability=async.*a crash loses them") as caught:
            rig.commit(prepared)
        assert "epoch 1 stays pending in the ledger, its rows in the spool: nothing is lost" in str(caught.value)
        assert caught.value.hint == HINT.format(sink.index, "index.translog.durability", "request")
        server.kill()
        server.start()
        with closing(rig.another_driver()) as restarted:
            change(restarted, sink.index, REQUEST)
            assert restarted.commit(prepared).outcome.value == "committed"
        server.kill()
        server.start()
        with closing(rig.another_driver()) as restarted:
            assert restarted.stored() == dict(FIRST + SECOND)


CHANGES: list[tuple[str, dict[str, str], str]] = [
    ("index.translog.durability", {"index.translog.durability": "async"}, "request"),
    ("index.gc_deletes", {"index.gc_deletes": "2s"}, "1h"),
]


@pytest.mark.parametrize(("setting", "changed", "wanted"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_a_setting_that_is_changed_under_a_running_query_stops_vote_and_commit_until_it_is_set_back(
    sink: Elasticsearch, client: vendor.Elasticsearch, setting: str, changed: dict[str, str], wanted: str
) -> None:
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered(FIRST)])
        prepared = rig.prepare(1, [rendered(SECOND)])
        client.indices.put_settings(index=sink.index, settings=changed)
        with pytest.raises(PrepareFailed, match=f"{setting}={changed[setting]}") as at_vote:
            rig.prepare(2, [rendered([("c", {"n": 0})])])
        assert "epoch 2 is not recorded, so nothing is lost: the next start writes it" in str(at_vote.value)
        assert at_vote.value.may_pass is False
        with pytest.raises(OutcomeUnknown, match=f"{setting}={changed[setting]}") as at_commit:
            rig.commit(prepared)
        assert "epoch 1 stays pending in the ledger, its rows in the spool: nothing is lost" in str(at_commit.value)
        for stopped in (at_vote.value, at_commit.value):
            assert HINT.format(sink.index, setting, wanted) in stopped.hint
        assert rig.committer.newest() == 0
        assert set(rig.stored()) == {name for name, _ in FIRST}
        client.indices.put_settings(index=sink.index, settings={setting: wanted})
        rig.commit(prepared)
        assert set(rig.stored()) == {name for name, _ in FIRST + SECOND}


def test_a_setting_that_is_changed_while_an_epoch_is_applied_keeps_it_from_counting_as_applied(
    sink: Elasticsearch, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(point: str) -> None:
        if point == "elasticsearch.bulk.between":
            client.indices.put_settings(index=sink.index, settings={"index.translog.durability": "async"})

    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered(FIRST)])
        with monkeypatch.context() as patch:
            patch.setattr("epochsink.elasticsearch.apply.failpoints.reach", change)
            with pytest.raises(OutcomeUnknown, match="durability=async"):
                rig.commit(prepared)
        assert rig.committer.newest() is None
        client.indices.put_settings(index=sink.index, settings=REQUEST)
        rig.commit(prepared)
        assert rig.stored() == dict(FIRST)


@pytest.mark.parametrize("which", ["markers", "dead letters"])
def test_markers_and_dead_letters_may_not_be_forgotten_either(
    private_elasticsearch: PrivateElasticsearch, fresh_index: FreshName, which: str
) -> None:
    """Dead letters are the only copy of their rows once the epoch is done."""
    dead = fresh_index("dead")
    options: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": dead}
    sink = Elasticsearch(private_elasticsearch().url, index=fresh_index(), key="id", **options)
    name = MARKERS if which == "markers" else dead
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered(FIRST)])
        change(rig, name, ASYNCHRONOUS)
        found: list[str | EpochsinkError] = [*rig.committer.check(SCHEMA)]
        for what in (lambda: rig.commit(prepared), lambda: rig.prepare(1, [rendered(SECOND)])):
            with pytest.raises(EpochsinkError) as caught:
                what()
            found.append(caught.value)
        assert len(found) == 3
        assert all(f"index '{name}' has index.translog.durability=async" in str(each) for each in found)
        change(rig, name, REQUEST)
        rig.commit(prepared)
        assert rig.stored() == dict(FIRST)


def change(rig: Rig, index: str, settings: dict[str, str]) -> None:
    """Change an index's settings, as an operator would."""
    with closing(connect(rig.sink)) as client:
        client.indices.put_settings(index=index, settings=settings)
