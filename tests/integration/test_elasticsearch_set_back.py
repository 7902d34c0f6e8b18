"""An index, or a marker, that is an older state of itself."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import pytest
from elasticsearch_rig import Rig, rendered

from epochsink.elasticsearch import Elasticsearch, applied_epochs
from epochsink.errors import LedgerCorrupt, WentBack
from epochsink.identity import marker_document
from epochsink.sink import LastDone, identity_key
from epochsink_devkit.services import LocalElasticsearch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticsearch_rig import Prepared
    from fix_services import FreshName

BACKUP = "backup"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vendor.Elasticsearch]:
    """Return a client of a node that can make snapshots."""
    folder = str(tmp_path_factory.mktemp("snapshots"))
    with (
        LocalElasticsearch({"path.repo": folder}, short_lived=True) as node,
        closing(vendor.Elasticsearch(node.url)) as connected,
    ):
        connected.snapshot.create_repository(name=BACKUP, repository={"type": "fs", "settings": {"location": folder}})
        yield connected


@pytest.fixture
def rig(client: vendor.Elasticsearch, fresh_index: FreshName) -> Iterator[Rig]:
    (node,) = client.transport.node_pool.all()
    with closing(Rig.joining(Elasticsearch(node.base_url, index=fresh_index(), key="id", timeout=20.0))) as made:
        yield made


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Return what has something happen, once, at a point of an apply."""

    def set_up(wanted: str, happen: Callable[[], object]) -> None:
        ahead = [happen]

        def reach(point: str) -> None:
            if point == wanted and ahead:
                ahead.pop()()

        monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", reach)

    return set_up


def apply(rig: Rig, number: int) -> Prepared:
    return rig.apply(number, [rendered([(f"d{number}", {"n": number})])])


def prepare(rig: Rig, number: int, after: LastDone | None = None) -> Prepared:
    return rig.prepare(number, [rendered([(f"d{number}", {"n": number})])], after=after)


def last(done: Prepared) -> LastDone:
    return LastDone(done.epoch.number, done.epoch.attempt, (done.part,))


def snapshot(client: vendor.Elasticsearch, index: str) -> None:
    client.snapshot.create(
        repository=BACKUP, snapshot=index, indices=[index], include_global_state=False, wait_for_completion=True
    )


def restore(client: vendor.Elasticsearch, index: str) -> None:
    """Put the older state in the place of the index, which keeps its name and uuid."""
    client.indices.close(index=index)
    client.snapshot.restore(
        repository=BACKUP, snapshot=index, indices=[index], include_global_state=False, wait_for_completion=True
    )


def marker(client: vendor.Elasticsearch, rig: Rig) -> dict[str, Any]:
    found = client.get(index=applied_epochs.INDEX, id=marker_document(identity_key(rig.identity)))
    return dict(found["_source"])


def put_marker(client: vendor.Elasticsearch, rig: Rig, document: dict[str, Any] | None) -> None:
    name = marker_document(identity_key(rig.identity))
    if document is None:
        client.delete(index=applied_epochs.INDEX, id=name)
    else:
        client.index(index=applied_epochs.INDEX, id=name, document=document)


def test_a_snapshot_restored_over_the_index_stops_every_way_on_until_it_is_accepted(
    rig: Rig, client: vendor.Elasticsearch
) -> None:
    apply(rig, 0)
    snapshot(client, rig.sink.index)
    done = apply(rig, 1)
    rig.committer.verify_applied(last(done), None)
    restore(client, rig.sink.index)
    restored = "a snapshot was restored over it"
    with closing(rig.another_driver()) as starting, pytest.raises(WentBack, match=restored):
        starting.committer.verify_applied(last(done), None)
    with pytest.raises(WentBack, match=restored):
        rig.commit(done)
    with pytest.raises(WentBack, match=restored) as caught:
        prepare(rig, 2)
    assert "epochsink accept CHECKPOINT 1 --sink NAME" in caught.value.hint
    accepted = LastDone(1, "", ())
    with closing(rig.another_driver()) as starting:
        starting.committer.verify_applied(accepted, None)
        assert starting.commit(prepare(starting, 2, accepted), accepted).outcome.value == "committed"
    apply(rig, 3)
    assert rig.stored().keys() == {"d0", "d2", "d3"}


def test_a_marker_of_another_version_is_refused_by_name(rig: Rig, client: vendor.Elasticsearch) -> None:
    apply(rig, 0)
    put_marker(client, rig, {**marker(client, rig), "version": 2})
    for what in (lambda: prepare(rig, 1), lambda: rig.committer.verify_applied(None, None)):
        with pytest.raises(LedgerCorrupt, match="has version 2, and this epochsink reads version 1 only"):
            what()


def test_a_snapshot_restored_while_an_epoch_is_applied_is_no_success(
    rig: Rig, client: vendor.Elasticsearch, at: Callable[[str, Callable[[], object]], None]
) -> None:
    snapshot(client, rig.sink.index)
    apply(rig, 0)
    prepared = prepare(rig, 1)
    at("elasticsearch.bulk.between", lambda: restore(client, rig.sink.index))
    with pytest.raises(WentBack, match="a snapshot was restored over it"):
        rig.commit(prepared)
    assert marker(client, rig)["epoch"] == 0


@pytest.mark.parametrize("forgotten", [False, True], ids=["older", "deleted"])
def test_a_marker_that_is_set_back_while_an_epoch_is_applied_is_not_written_over(
    rig: Rig,
    client: vendor.Elasticsearch,
    at: Callable[[str, Callable[[], object]], None],
    *,
    forgotten: bool,
) -> None:
    apply(rig, 0)
    older = None if forgotten else marker(client, rig)
    done = apply(rig, 1)
    prepared = prepare(rig, 2)
    at("elasticsearch.marker.before", lambda: put_marker(client, rig, older))
    with pytest.raises(WentBack, match="no marker of this query" if forgotten else "the target is the older copy"):
        rig.commit(prepared, last(done))
