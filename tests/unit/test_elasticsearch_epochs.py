"""What an epoch's commit sends, in which order, and when it sends nothing: against a server that keeps versions."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import elasticsearch as vendor
import pytest
from elasticsearch_rig import DONE, ListedRows, Rig, keyless, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import Elasticsearch, applied_epochs, bulk_request, deduplicate
from epochsink.elasticsearch.applied_epochs import EPOCHS, Lookout, Overtaken
from epochsink.elasticsearch.errors import NotServed, RequestRefused
from epochsink.elasticsearch.indices import refresh
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import EpochsinkError, OutcomeUnknown, PrepareFailed, RowsRejected, SpoolMissing, WentBack
from epochsink.identity import claim_document, marker_document
from epochsink.sink import Epoch, Identity, LastDone, Outcome, identity_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticsearch_rig import Prepared

BASE: Final = 1_700_000_000 * EPOCHS
IDENTITY: Final = Identity("query", "search", 1, {"base": BASE})
KEY: Final = identity_key(IDENTITY)
ORDERS: Final = "orders"


@dataclass
class Stored:
    """One document: its version, its source (None: deleted), and how often it was written."""

    version: int
    source: dict[str, Any] | None
    changes: int = 0


@dataclass
class Node:
    """Keeps documents with versions as Elasticsearch does; ``bulks`` are the ids of each bulk request to the index.

    ``after_bulk`` is called after the first one. ``refused`` are ids that are answered 403, as is a marker.
    """

    documents: dict[str, dict[str, Stored]] = field(default_factory=lambda: {ORDERS: {}, applied_epochs.INDEX: {}})
    settings: dict[str, str] = field(default_factory=dict)
    uuid: str = "u1"
    bulks: list[list[str]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    after_bulk: Callable[[Node], None] | None = None
    data_nodes: int | None = None
    """How many nodes the cluster has; None if it does not say."""

    def __call__(self, seen: Seen) -> Answer:
        url = urlsplit(seen.path)
        names, _, rest = unquote(url.path).strip("/").partition("/")
        asked = {name: value for name, (value,) in parse_qs(url.query).items()}
        if rest == "health":
            nodes = {"number_of_data_nodes": self.data_nodes}
            return said(nodes) if self.data_nodes else said({"error": {"type": "x", "reason": "no"}}, 403)
        if rest == "_bulk":
            return self._bulk(names, seen)
        if rest == "_mget":
            return said({"docs": [self._told(names, each) for each in json.loads(seen.body)["ids"]]})
        if rest.startswith(("_doc/", "_create/")):
            kind, _, name = rest.partition("/")
            if seen.method == "GET":
                told = self._told(names, name)
                return said(told, 200 if told["found"] else 404)
            return self._write(names, name, seen, {"op_type": "create"} if kind == "_create" else asked)
        return said({each: self._described(each) for each in names.split(",") if each in self.documents})

    def recreate(self) -> None:
        """Have an empty index of the same name."""
        self.documents[ORDERS] = {}
        self.uuid += "'"

    def sources(self) -> dict[str, dict[str, Any]]:
        return {name: each.source for name, each in self.documents[ORDERS].items() if each.source is not None}

    def versions(self) -> set[int]:
        return {each.version for each in self.documents[ORDERS].values()}

    @property
    def marker(self) -> dict[str, Any] | None:
        kept = self.documents[applied_epochs.INDEX].get(marker_document(KEY))
        return None if kept is None else kept.source

    def mark(self, **changed: Any) -> None:
        """Write the marker as another driver does."""
        kept = self.documents[applied_epochs.INDEX].setdefault(marker_document(KEY), Stored(0, {}))
        kept.changes += 1
        told = {"version": 1, "index": ORDERS, "index_uuid": self.uuid, "history": "", "run": "another"}
        kept.source = told | changed

    def claim(self, epoch: int) -> None:
        """Claim an epoch as another copy of the checkpoint does."""
        claimed = {"query": "query", "sink": "search", "epoch": epoch, "attempt": "f" * 32}
        kept = self.documents[applied_epochs.INDEX].setdefault(claim_document(KEY), Stored(0, {}))
        kept.source, kept.changes = claimed, kept.changes + 1

    def _described(self, index: str) -> dict[str, Any]:
        own = {"index.uuid": self.uuid, "index.gc_deletes": "1h", **self.settings} if index == ORDERS else {}
        return {"aliases": {}, "settings": {"index.uuid": "m1", **own}}

    def _told(self, index: str, name: str) -> dict[str, Any]:
        kept = self.documents[index].get(name)
        if kept is None or kept.source is None:
            return {"_id": name, "found": False}
        place = {"_seq_no": kept.changes, "_primary_term": 1}
        return {"_id": name, "found": True, "_version": kept.version, "_source": kept.source, **place}

    def _write(self, index: str, name: str, seen: Seen, asked: dict[str, str]) -> Answer:
        if name in self.refused:
            return said({"error": {"type": "security_exception", "reason": "no"}}, 403)
        kept = self.documents[index].get(name)
        wanted = asked.get("if_seq_no")
        if (kept and asked.get("op_type") == "create") or (wanted and (not kept or int(wanted) != kept.changes)):
            return said({"error": {"type": "version_conflict_engine_exception", "reason": "no"}}, 409)
        changes = kept.changes + 1 if kept else 0
        self.documents[index][name] = Stored(0, json.loads(seen.body), changes)
        return said({"_seq_no": changes, "_primary_term": 1})

    def _bulk(self, index: str, seen: Seen) -> Answer:
        items = []
        for operation in seen.operations:
            line, _, document = operation.partition(b"\n")
            [(action, told)] = json.loads(line).items()
            kept = self.documents[index].get(told["_id"])
            is_older = kept is not None and (
                kept.version > told["version"]
                or (kept.version == told["version"] and told["version_type"] == "external")
            )
            if is_older:
                error = {"type": "version_conflict_engine_exception", "reason": "newer"}
                items.append({action: {"status": 409, "error": error}})
                continue
            source = json.loads(document) if action == "index" else None
            self.documents[index][told["_id"]] = Stored(told["version"], source)
            items.append({action: {"status": 200}})
        if index == ORDERS:
            self.bulks.append(seen.ids)
        if self.after_bulk is not None:
            once, self.after_bulk = self.after_bulk, None
            once(self)
        return said({"errors": any("error" in one for item in items for one in item.values()), "items": items})


def said(body: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode())


@pytest.fixture
def node() -> Node:
    # all tests have one identity
    DONE.pop(KEY, None)
    return Node()


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    with Proxy(None, node) as server:
        yield server.url


@pytest.fixture
def rig(url: str) -> Iterator[Rig]:
    with contextlib.closing(Rig(Elasticsearch(url, index=ORDERS, key="id", timeout=5), IDENTITY)) as made:
        yield made


@pytest.fixture
def without_key(url: str) -> Iterator[Rig]:
    with contextlib.closing(Rig(Elasticsearch(url, index=ORDERS, timeout=5), IDENTITY)) as made:
        yield made


def documents(*names: str, n: int = 1) -> Any:
    return rendered([(name, {"n": n}) for name in names])


def last(prepared: Prepared) -> LastDone:
    return LastDone(prepared.epoch.number, prepared.epoch.attempt, (prepared.part,))


# ---- the rows of the spool


class Damaged(ListedRows):
    """A spool one of whose files was changed; they can be read up to there."""

    def verify(self) -> None:
        raise SpoolMissing("the second file was cut")


def test_a_damaged_spool_is_noticed_before_the_first_document(rig: Rig, node: Node) -> None:
    """A part of an epoch could not be taken back."""
    prepared = rig.prepare(0, [documents("a")], [documents("b")])
    tasks = {task: list(prepared.rows.read(task)) for task in prepared.rows.tasks()}
    with pytest.raises(SpoolMissing, match="was cut"):
        rig.commit(replace(prepared, rows=Damaged(tasks)))
    assert node.sources() == {}


def test_a_spool_with_fewer_rows_than_are_recorded_gets_no_marker(rig: Rig, node: Node) -> None:
    prepared = rig.prepare(0, [documents("a", "b")])
    (task,) = prepared.rows.tasks()
    with pytest.raises(OutcomeUnknown, match="holds 1 rows, but the ledger records 2"):
        rig.commit(replace(prepared, rows=ListedRows({task: [documents("a")]})))
    assert node.marker is None


def test_a_spool_with_fewer_rows_than_the_tasks_wrote_fails_the_vote(rig: Rig) -> None:
    prepared = rig.prepare(0, [documents("a", "b")])
    (task,) = prepared.rows.tasks()
    told = [{"version": prepared.part["version"], "task": task, "rows": 2, "largest": 9, "by_task": False}]
    with pytest.raises(PrepareFailed, match="holds 1 rows, but the tasks wrote 2"):
        rig.committer.vote(prepared.epoch, told, ListedRows({task: [documents("a")]}))
    with pytest.raises(PrepareFailed, match="but the accepted tasks are"):
        rig.committer.vote(prepared.epoch, told, ListedRows({}))


def test_each_id_is_sent_once_and_its_last_row_stays(rig: Rig, node: Node) -> None:
    """Of equal versions the server keeps what arrives last, and requests overtake each other."""
    rig.apply(0, [documents("a", "b"), documents("a", n=2)])
    assert [sorted(ids) for ids in node.bulks] == [["a", "b"]]
    assert node.sources() == {"a": {"n": 2}, "b": {"n": 1}}


def test_every_row_without_a_key_has_an_id_of_its_own(
    without_key: Rig, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its task, its place in the task and its epoch."""
    monkeypatch.setattr(Elasticsearch, "bulk_bytes", 10)
    task = [keyless([{"n": 1}, {"n": 1}]), keyless([{"n": 1}])]
    for number in range(2):
        without_key.apply(number, task, task)
    assert len(node.sources()) == 12


def test_where_spark_brings_keys_together_the_last_rows_are_found_task_by_task(
    node: Node, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the driver has read the ids of all tasks")

    monkeypatch.setattr(deduplicate, "count", read)
    sink = Elasticsearch(url, index=ORDERS, key="id", order_by="n", partition_by_key=True, timeout=5)
    with contextlib.closing(Rig(sink, IDENTITY)) as rig:
        tasks = [[ranked("a", 5), ranked("a", 7), ranked("b", 1)], [ranked("c", 2), ranked("c", 1)]]
        rig.apply(0, *tasks)
    assert node.sources() == {"a": {"n": 7}, "b": {"n": 1}, "c": {"n": 2}}


def ranked(name: str, rank: int) -> Any:
    return rendered([(name, {"n": rank})], [rank])


@pytest.mark.parametrize(("data_nodes", "at_once"), [(1, 2), (3, 6), (None, 2), (200, 16)])
def test_the_number_of_requests_at_once_follows_the_data_nodes(
    rig: Rig, node: Node, monkeypatch: pytest.MonkeyPatch, data_nodes: int | None, at_once: int
) -> None:
    node.data_nodes = data_nodes
    monkeypatch.setattr(Elasticsearch, "bulk_bytes", 10)
    posted: list[int] = []

    def post_all(*given: Any) -> None:
        posted.append(given[2])
        bulk_request.post_all(*given)

    monkeypatch.setattr("epochsink.elasticsearch.apply.post_all", post_all)
    for number in range(2):
        rig.apply(number, [documents("a", "b", "c")])
    assert posted == [at_once, at_once]
    assert set(node.sources()) == {"a", "b", "c"}


# ---- versions


def test_an_epoch_that_is_applied_again_writes_the_same_versions(rig: Rig, node: Node) -> None:
    """A higher one would win over a later epoch of a driver that has gone on."""
    node.refused.add(marker_document(KEY))
    prepared = rig.prepare(1, [documents("a", "b")])
    with pytest.raises(OutcomeUnknown):
        rig.commit(prepared)
    node.refused.clear()
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert len(node.bulks) == 2
    assert node.versions() == {BASE + 1}


def partly_applied(rig: Rig, node: Node, batch: Any) -> Prepared:
    """Apply an epoch up to its marker, after which something else changes the document."""
    node.refused.add(marker_document(KEY))
    prepared = rig.prepare(0, [batch])
    with pytest.raises(OutcomeUnknown):
        rig.commit(prepared)
    node.refused.clear()
    (kept,) = node.documents[ORDERS].values()
    kept.source, kept.version = {"n": "changed"}, kept.version + 1
    return prepared


def test_a_row_without_a_key_that_was_stored_and_then_changed_stays_changed(without_key: Rig, node: Node) -> None:
    prepared = partly_applied(without_key, node, keyless([{"n": 1}]))
    assert without_key.commit(prepared).outcome is Outcome.COMMITTED
    assert list(node.sources().values()) == [{"n": "changed"}]


def test_a_document_with_a_key_that_was_changed_elsewhere_gets_the_row(rig: Rig, node: Node) -> None:
    prepared = partly_applied(rig, node, documents("a"))
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert node.sources() == {"a": {"n": 1}}


def test_a_document_of_another_sink_is_not_overwritten(rig: Rig, node: Node) -> None:
    node.documents[ORDERS]["a"] = Stored(BASE + EPOCHS, {"n": "theirs"})
    prepared = rig.prepare(0, [documents("a")])
    with pytest.raises(RowsRejected, match="which this sink did not write"):
        rig.commit(prepared)
    assert node.sources() == {"a": {"n": "theirs"}}
    assert node.marker is None


# ---- markers and claims


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_another_attempt_applied_or_a_later_one_is_unknown(rig: Rig, node: Node, epoch: int) -> None:
    """The marker of a later epoch says nothing of this one: it may be another copy's, which has not got this epoch."""
    prepared = rig.prepare(0, [documents("a")])
    node.mark(epoch=epoch, attempt="f" * 32)
    verdict = rig.commit(prepared)
    assert verdict.outcome is Outcome.UNKNOWN
    assert node.bulks == []


def test_an_epoch_that_another_attempt_has_claimed_is_not_applied(rig: Rig, node: Node) -> None:
    """Their documents would be mixed."""
    prepared = rig.prepare(0, [documents("a")])
    node.claim(0)
    with pytest.raises(WentBack, match="a driver on another copy of this checkpoint"):
        rig.commit(prepared)
    assert node.bulks == []


@pytest.mark.parametrize("applied", [True, False])
def test_a_claim_of_an_epoch_that_this_ledger_does_not_have_is_not_overwritten(
    rig: Rig, node: Node, *, applied: bool
) -> None:
    """Another copy of the checkpoint may be applying that epoch, whose input is in a later one here."""
    after = last(rig.apply(0, [documents("a")])) if applied else None
    prepared = rig.prepare(5, [documents("b")], after=after)
    node.claim(3)
    with pytest.raises(WentBack, match="epoch 3 of this query is being applied"):
        rig.commit(prepared, after)
    assert "b" not in node.sources()


def test_a_marker_of_an_epoch_that_this_ledger_does_not_have_stops_the_commit(without_key: Rig, node: Node) -> None:
    """Another copy has finished that epoch since the comparison: its input may be that of this epoch."""
    prepared = without_key.prepare(6, [keyless([{"n": 1}])])
    without_key.committer.verify_applied(None, last(prepared))
    node.claim(5)
    node.mark(epoch=5, attempt="f" * 32)
    time.sleep(0.1)
    with pytest.raises(WentBack, match="already holds epoch 5 of this query"):
        without_key.commit(prepared)
    assert node.bulks == []
    assert node.marker is not None
    assert node.marker["epoch"] == 5


@pytest.mark.parametrize("closed", [3, 9])
def test_a_claim_of_an_epoch_that_an_operator_has_closed_is_overwritten(rig: Rig, node: Node, closed: int) -> None:
    rig.apply(0, [documents("a")])
    node.claim(3)
    prepared = rig.prepare(5, [documents("b")])
    assert rig.commit(prepared, LastDone(closed, "", ())).outcome is Outcome.COMMITTED
    assert "b" in node.sources()


def test_a_claim_of_another_attempt_is_not_overwritten_after_an_operator_has_closed_a_later_epoch(
    rig: Rig, node: Node
) -> None:
    node.claim(5)
    with pytest.raises(WentBack, match="epoch 5 of this query is being applied"):
        rig.commit(rig.prepare(5, [documents("b")]), LastDone(9, "", ()))
    assert node.sources() == {}


def test_a_marker_that_changes_while_an_epoch_is_applied_is_not_overwritten(rig: Rig, node: Node) -> None:
    prepared = rig.prepare(0, [documents("a")])
    node.after_bulk = lambda changed: changed.mark(epoch=1, attempt="f" * 32)
    rig.commit(prepared)
    assert node.marker is not None
    assert node.marker["epoch"] == 1


def test_a_marker_is_read_again_unless_it_was_read_just_now(rig: Rig, node: Node) -> None:
    """Meanwhile another driver may have applied the epoch, and later ones on top of it."""
    prepared = rig.prepare(0, [documents("a")])
    rig.committer.verify_applied(None, last(prepared))
    node.mark(epoch=0, attempt=prepared.epoch.attempt)
    time.sleep(0.1)
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert node.bulks == []


def test_an_epoch_that_is_applied_already_stops_the_vote(rig: Rig, node: Node) -> None:
    rig.apply(0, [documents("a")])
    with pytest.raises(WentBack, match="the checkpoint is an older copy"):
        rig.prepare(0, [documents("b")])
    assert node.sources() == {"a": {"n": 1}}


def test_a_run_that_was_overtaken_stops(node: Node, url: str) -> None:
    with vendor.Elasticsearch(url) as client:
        lookout = Lookout(ElasticsearchServer(client), IDENTITY, Epoch(5, "a" * 32))
        lookout.now()
        node.mark(epoch=4, attempt="f" * 32)
        lookout.now()
        for epoch in (5, 6):
            node.mark(epoch=epoch, attempt="f" * 32)
            with pytest.raises(Overtaken):
                lookout.now()


@pytest.mark.parametrize("clock", ["monotonic", "time", "clock_gettime"])
def test_a_run_looks_again_after_a_pause_by_whichever_clock(
    node: Node, url: str, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    """The monotonic clock stands still while the machine is suspended."""
    with vendor.Elasticsearch(url) as client:
        lookout = Lookout(ElasticsearchServer(client), IDENTITY, Epoch(5, "a" * 32))
        node.mark(epoch=5, attempt="f" * 32)
        lookout.now_and_then()
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda *which: real(*which) + 2 * applied_epochs.LOOK_EVERY)
        with pytest.raises(Overtaken):
            lookout.now_and_then()


def test_a_look_that_failed_is_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer(404, b'{"message":"no route"}')]
    with (
        Proxy(None, lambda seen: answers.pop() if answers else node(seen)) as server,
        vendor.Elasticsearch(server.url) as client,
    ):
        lookout = Lookout(ElasticsearchServer(client), IDENTITY, Epoch(5, "a" * 32))
        node.mark(epoch=5, attempt="f" * 32)
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 2 * applied_epochs.LOOK_EVERY)
        with pytest.raises(RequestRefused, match="HTTP 404"):
            lookout.now_and_then()
        with pytest.raises(Overtaken):
            lookout.now_and_then()


def test_an_answer_that_is_not_the_servers_is_not_an_absent_marker() -> None:
    """A proxy's 404 says nothing about the document; without a marker, an epoch would be applied again."""
    with (
        Proxy(None, lambda _: Answer(404, b'{"message":"no route"}')) as server,
        contextlib.closing(Rig(Elasticsearch(server.url, index=ORDERS, timeout=5), IDENTITY)) as rig,
        pytest.raises(EpochsinkError, match="reading the marker"),
    ):
        rig.committer.newest()


# ---- the index


def test_an_index_that_was_created_again_takes_no_further_epoch(rig: Rig, node: Node) -> None:
    done = rig.apply(0, [documents("a")])
    prepared = rig.prepare(1, [documents("b")], after=last(done))
    node.recreate()
    with pytest.raises(WentBack, match="is not the one that epoch 0 was applied to"):
        rig.commit(prepared, last(done))
    with pytest.raises(WentBack, match="is not the one that epoch 0 was applied to"):
        rig.another_driver().committer.verify_applied(last(done), None)
    assert node.sources() == {}


def test_an_index_that_is_created_again_during_the_run_gets_all_documents(rig: Rig, node: Node) -> None:
    node.after_bulk = Node.recreate
    rig.apply(0, [documents("a", "b")])
    assert set(node.sources()) == {"a", "b"}
    assert node.marker is not None
    assert node.marker["index_uuid"] == node.uuid


@pytest.mark.parametrize(
    ("settings", "delete_when", "why"),
    [
        ({"index.translog.durability": "async"}, None, "a crash loses them"),
        ({"index.gc_deletes": "60s"}, "n < 0", "would then restore the document"),
    ],
    ids=["asynchronous", "forgetful"],
)
def test_an_index_that_does_not_keep_what_it_acknowledges_is_refused(
    settings: dict[str, str], delete_when: str | None, why: str, node: Node, *, url: str
) -> None:
    sink = Elasticsearch(url, index=ORDERS, key="id", delete_when=delete_when, timeout=5)
    with contextlib.closing(Rig(sink, IDENTITY)) as rig:
        prepared = rig.prepare(0, [documents("a")])
        node.settings |= settings
        with pytest.raises(PrepareFailed, match=why):
            rig.prepare(0, [documents("a")])
        with pytest.raises(OutcomeUnknown, match=why):
            rig.commit(prepared)
    assert node.sources() == {}


@pytest.mark.parametrize(("successful", "failed"), [(1, 0), (1, 1), (2, 1)])
def test_a_refresh_that_leaves_out_a_shard_is_not_one(successful: int, failed: int) -> None:
    answer = said({"_shards": {"total": 2, "successful": successful, "failed": failed}})
    with (
        Proxy(None, lambda _: answer) as server,
        vendor.Elasticsearch(server.url) as client,
        pytest.raises(NotServed),
    ):
        refresh(ElasticsearchServer(client), ORDERS, primaries=2)
