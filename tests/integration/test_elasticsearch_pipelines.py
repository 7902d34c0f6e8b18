"""Ingest pipelines that drop, reroute or rename documents lose no row: refused by check(), or by the answer's look.

The development server has no processors, so pipelines of a real index are empty, and a proxy before it does what their
processors would: it answers as a server with all modules does.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from elasticsearch_requests import OneByOne
from elasticsearch_rig import SCHEMA, Rig, keyless, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch.connection import connect
from epochsink.errors import OutcomeUnknown, PrepareFailed, RowsRejected
from epochsink.sink import Chosen, Outcome, Retried
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

ROWS: list[Document] = [(f"d{number}", {"n": number}) for number in range(40)]
PIPELINE = {"index.default_pipeline": "epochsink-test-empty"}
ARRIVED: dict[str, Any] = {"result": "created", "status": 201}
MOVED: dict[str, dict[str, Any]] = {
    "drop": {"result": "noop", "_version": -3, "status": 200},
    "reroute": {**ARRIVED, "_index": "elsewhere"},
    "rename": {**ARRIVED, "_id": "another"},
    "version": {**ARRIVED, "_version": 1},
}


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Arguments of a sink whose epoch has many requests."""
    common = {"key": "id", "timeout": 20.0}
    return {"hosts": elasticsearch.url, "index": fresh_index(), "create": {"number_of_replicas": 0}, **common}


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(OneByOne(**options))) as connected:
        connected.ingest.put_pipeline(id=PIPELINE["index.default_pipeline"], processors=[])
        yield connected


class Pipeline:
    """What a proxy does: it keeps one document of all from the index, and answers as a server whose pipeline does."""

    def __init__(self, proxy: Proxy, index: str, answer: dict[str, Any]) -> None:
        self._proxy = proxy
        self._index = index
        self._answer = answer
        self.moved: str | None = None

    def __call__(self, seen: Seen) -> Answer | None:
        if not seen.is_bulk or b'"if_seq_no"' in seen.body:
            return None
        self.moved = self.moved or seen.ids[-1]
        kept = [one for one in seen.operations if f'"_id":"{self.moved}"'.encode() not in one]
        self._proxy.forward(seen.only(kept))
        items = [{"index": self._item(name, *seen.versions)} for name in seen.ids]
        told = {"items": items} if "items" in seen.path else {}
        return Answer(200, json.dumps({"errors": False, **told}).encode())

    def _item(self, name: str, version: int) -> dict[str, Any]:
        place = {"_index": self._index, "_id": name, "_version": version}
        return {**place, **(self._answer if name == self.moved else ARRIVED)}


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize("how", list(MOVED))
def test_a_document_that_a_pipeline_takes_elsewhere_stops_the_query_and_is_written_once_the_pipeline_is_gone(
    options: dict[str, Any], client: vendor.Elasticsearch, how: str, *, keyed: bool
) -> None:
    if not keyed:
        del options["key"]
    batch = rendered(ROWS) if keyed else keyless([document or {} for _, document in ROWS])
    client.indices.create(index=options["index"], settings={**PIPELINE, "number_of_replicas": 0})
    with closing(Rig.joining(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [batch])
        with Proxy(options["hosts"], lambda _: None) as proxy:
            pipeline = proxy.behave = Pipeline(proxy, options["index"], MOVED[how])
            through = OneByOne(**{**options, "hosts": proxy.url})
            with closing(Rig(through, rig.identity)) as losing, pytest.raises(OutcomeUnknown) as caught:
                losing.commit(prepared)
        assert "has dropped 1 of" in str(caught.value)
        assert "epoch 0 stays pending in the ledger, its rows in the spool: nothing is lost" in str(caught.value)
        assert f"PUT /{options['index']}/_settings" in caught.value.hint
        assert rig.committer.newest() is None
        assert pipeline.moved not in rig.stored()
        client.indices.put_settings(index=options["index"], settings=dict.fromkeys(PIPELINE))
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(40))


def test_an_index_with_a_pipeline_that_moves_nothing_is_written_to(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """Updates, deletes and documents changed elsewhere included."""
    client.indices.create(index=options["index"], settings={**PIPELINE, "number_of_replicas": 0})
    with closing(Rig.joining(OneByOne(**options))) as rig:
        rig.apply(0, [rendered(ROWS)])
        for touch in range(2):
            client.update(index=options["index"], id="d7", doc={"touched": touch})
        rig.apply(1, [rendered([("d7", {"n": 70}), ("d8", None), ("absent", None), ("new", {"n": 9})])])
        wanted = {**dict(ROWS), "d7": {"n": 70}, "new": {"n": 9}}
        del wanted["d8"]
        assert rig.stored() == wanted


def test_a_pipeline_of_the_sink_is_used_and_looked_at_and_recorded_with_the_epoch(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    given: dict[str, Any] = {"pipeline": "epochsink-test-empty"}
    with closing(Rig.joining(OneByOne(**options, **given))) as rig:
        rig.apply(0, [rendered(ROWS)])
        for touch in range(2):
            client.update(index=options["index"], id="d7", doc={"touched": touch})
        prepared = rig.prepare(1, [rendered([("d7", {"n": 70}), ("new", {"n": 9})])])
        with Proxy(options["hosts"], lambda _: None) as proxy:
            moving = Pipeline(proxy, options["index"], MOVED["drop"])
            proxy.behave = moving
            through = {**options, "hosts": proxy.url}
            losing = Rig(OneByOne(**through, **given), rig.identity)
            with closing(losing), pytest.raises(OutcomeUnknown, match="has dropped 1 of"):
                losing.commit(prepared)
            proxy.behave = lambda _: None
            proxy.seen.clear()
            with closing(Rig(OneByOne(**through), rig.identity)) as without:
                assert without.commit(prepared).outcome is Outcome.COMMITTED
            assert all("pipeline=epochsink-test-empty" in seen.path for seen in proxy.bulks)
        assert rig.stored() == {**dict(ROWS), "d7": {"n": 70}, "new": {"n": 9}}


def test_a_pipeline_that_comes_while_an_epoch_is_applied_is_looked_at(
    options: dict[str, Any], client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(point: str) -> None:
        if point == "elasticsearch.bulk.between":
            client.indices.put_settings(index=options["index"], settings=PIPELINE)

    with closing(Rig.joining(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [rendered(ROWS)])
        with Proxy(options["hosts"], lambda _: None) as proxy:
            proxy.behave = Pipeline(proxy, options["index"], MOVED["drop"])
            monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", come)
            through = OneByOne(**{**options, "hosts": proxy.url})
            with closing(Rig(through, rig.identity)) as losing, pytest.raises(OutcomeUnknown, match="has dropped 1 of"):
                losing.commit(prepared)
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert rig.stored() == dict(ROWS)


class Fails:
    """What a proxy does: it answers as a server whose pipeline fails for each document without the field ``n``."""

    def __init__(self, proxy: Proxy, index: str, kind: str) -> None:
        self._proxy = proxy
        self._index = index
        self._error = {"type": kind, "reason": "there is no n in card 4111"}

    def __call__(self, seen: Seen) -> Answer | None:
        if not seen.path.startswith(f"/{self._index}/_bulk") or "pipeline=_none" in seen.path:
            return None
        if b'"if_seq_no"' in seen.body:
            return self._said([self._failed("epochsink-check")])
        failed = [b'"n"' not in operation for operation in seen.operations]
        kept = [operation for operation, fails in zip(seen.operations, failed, strict=True) if not fails]
        if kept:
            self._proxy.forward(seen.only(kept))
        (version,) = seen.versions
        each = zip(seen.ids, failed, strict=True)
        return self._said([self._failed(name) if fails else self._stored(name, version) for name, fails in each])

    def _failed(self, name: str) -> dict[str, Any]:
        return {"_index": self._index, "_id": name, "status": 500, "error": self._error}

    def _stored(self, name: str, version: int) -> dict[str, Any]:
        return {"_index": self._index, "_id": name, "_version": version, **ARRIVED}

    @staticmethod
    def _said(items: list[dict[str, Any]]) -> Answer:
        errors = any("error" in each for each in items)
        return Answer(200, json.dumps({"errors": errors, "items": [{"index": each} for each in items]}).encode())


@pytest.mark.parametrize("kind", ["fail_processor_exception", "find_match"])
def test_a_document_that_a_pipeline_fails_on_is_refused_for_good(
    options: dict[str, Any], client: vendor.Elasticsearch, kind: str
) -> None:
    """The server answers 500, as it does if it is broken. The query can start: an empty document says nothing."""
    client.indices.create(index=options["index"], settings={**PIPELINE, "number_of_replicas": 0})
    batch = rendered([*ROWS, ("bad", {"card": 4111})])
    with Proxy(options["hosts"], lambda _: None) as proxy:
        proxy.behave = Fails(proxy, options["index"], kind)
        through = {**options, "hosts": proxy.url}
        with closing(Rig.joining(OneByOne(**through))) as rig:
            prepared = rig.prepare(0, [batch])
            with pytest.raises(RowsRejected) as stopped:
                rig.commit(prepared)
            assert f"1 times {kind}" in stopped.value.message
            assert "4111" not in stopped.value.message
            assert "4111" in stopped.value.values
            lettered = OneByOne(**through, on_rejected="dead_letter", dead_letter_index=f"{options['index']}_dead")
            with closing(Rig(lettered, rig.identity)) as again:
                assert again.committer.check(SCHEMA) == []
                verdict = again.commit(prepared)
                assert (verdict.outcome, verdict.set_aside) == (Outcome.COMMITTED, 1)
                assert again.stored() == dict(ROWS)
                letters = again.committer.participant.operator().letters("search")
                assert letters.retry(Chosen()).kept == 1
                proxy.behave = lambda _: None
                assert letters.retry(Chosen()) == Retried(written=1)
                assert again.stored() == {**dict(ROWS), "bad": {"card": 4111}}


DEFINITIONS: dict[str, list[dict[str, Any]]] = {
    "drop": [{"drop": {"if": "ctx.n == 1"}}],
    "reroute": [{"reroute": {"destination": "elsewhere"}}],
    "date_index_name": [{"date_index_name": {"field": "at", "date_rounding": "d"}}],
    "set": [{"set": {"field": "_id", "value": "x"}}],
    "rename": [{"rename": {"field": "n", "target_field": "_id"}}],
    "remove": [{"remove": {"field": ["a", "_routing"]}}],
    "foreach": [{"foreach": {"field": "tags", "processor": {"drop": {}}}}],
    "on_failure": [{"set": {"field": "a", "value": 1, "on_failure": [{"drop": {}}]}}],
    "pipeline": [{"pipeline": {"name": "inner"}}, {"pipeline": {"name": "outer"}}],
}


@pytest.mark.parametrize("kind", list(DEFINITIONS))
def test_a_pipeline_that_takes_documents_elsewhere_is_a_finding(
    options: dict[str, Any], client: vendor.Elasticsearch, kind: str
) -> None:
    definitions = {"epochsink-test-empty": DEFINITIONS[kind], "inner": DEFINITIONS["drop"], "outer": []}
    client.indices.create(index=options["index"], settings=PIPELINE)
    (finding,) = check(options, definitions)
    assert "drops documents or sends them to another index, _id or version" in finding
    assert ("'inner'" in finding) == (kind == "pipeline")
    assert f'PUT /{options["index"]}/_settings {{"index.default_pipeline": null' in finding


def test_a_pipeline_of_the_sink_is_checked_instead_of_the_default_one(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    client.indices.create(index=options["index"], settings=PIPELINE)
    definitions = {"epochsink-test-empty": DEFINITIONS["drop"], "mine": DEFINITIONS["set"], "fine": []}
    client.ingest.put_pipeline(id="mine", processors=[])
    (finding,) = check({**options, "pipeline": "mine"}, definitions)
    assert "has the ingest pipeline 'mine', whose processor 'set'" in finding
    assert "leave pipeline= out" in finding
    (finding,) = check({**options, "pipeline": "none-of-these"}, definitions)
    assert "pipeline with id [none-of-these] does not exist" in finding
    client.ingest.put_pipeline(id="fine", processors=[])
    assert check({**options, "pipeline": "fine"}, definitions) == []
    assert check({**options, "pipeline": "_none"}, definitions) == []


def test_a_pipeline_that_changes_fields_or_may_not_be_read_is_none(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    client.indices.create(index=options["index"], settings={"index.final_pipeline": "epochsink-test-empty"})
    harmless = [{"set": {"field": "a", "value": "b"}}, {"lowercase": {"field": "a", "target_field": "_ids"}}]
    assert check(options, {"epochsink-test-empty": harmless}) == []
    assert check(options, None) == []
    assert check(options, {}) == []


def check(options: dict[str, Any], definitions: dict[str, list[dict[str, Any]]] | None) -> list[str]:
    """Return the findings where pipelines are defined so; None: the user may not read them."""

    def behave(seen: Seen) -> Answer | None:
        name = seen.path.partition("?")[0].partition("/_ingest/pipeline/")[2]
        if not name:
            return None
        if definitions is None:
            return Answer(403, b'{"error":{"type":"security_exception","reason":"no"},"status":403}')
        found = {name: {"processors": definitions[name]}} if name in definitions else {}
        return Answer(200 if found else 404, json.dumps(found).encode())

    with (
        Proxy(options["hosts"], behave) as proxy,
        closing(OneSink.of(OneByOne(**{**options, "hosts": proxy.url}))) as committer,
    ):
        return committer.check(SCHEMA)


def test_dead_letters_and_markers_pass_no_pipeline(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    dead = f"{options['index']}_dead"
    sink = OneByOne(**options, on_rejected="dead_letter", dead_letter_index=dead)
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered(ROWS)])
        client.indices.put_settings(index=dead, settings=PIPELINE)
        (finding,) = rig.committer.check(SCHEMA)
        with pytest.raises(PrepareFailed) as at_vote:
            rig.prepare(1, [rendered(ROWS)])
        with pytest.raises(OutcomeUnknown) as at_commit:
            rig.commit(prepared)
        for said in (finding, str(at_vote.value), str(at_commit.value)):
            assert f"index '{dead}' has the ingest pipeline(s) epochsink-test-empty" in said
        client.indices.put_settings(index=dead, settings=dict.fromkeys(PIPELINE))
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
