"""Documents that the server refuses for good: the query stops, or they are set aside, and none is lost."""

from __future__ import annotations

import base64
import json
import random
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_requests import SmallRequests
from elasticsearch_rig import SCHEMA, ListedRows, Rig, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import Elasticsearch, preflight
from epochsink.elasticsearch.committable import WrittenTask
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import PrepareFailed, RowsRejected, WentBack
from epochsink.identity import claim_document, marker_document
from epochsink.sink import Chosen, Epoch, LastDone, Outcome, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

GOOD: list[Document] = [(f"good{number}", {"n": number}) for number in range(8)]
FIELDS = {"id": {"type": "keyword"}, "n": {"type": "long"}, "at": {"type": "date"}}
BAD: list[Document] = [("bad-number", {"n": "many"}), ("bad-date", {"at": "2026-13-45"})]


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Return the arguments of a sink whose index refuses more than one that it makes itself would."""
    name = fresh_index()
    with closing(connect(Elasticsearch(elasticsearch.url, index=name))) as connected:
        connected.indices.create(index=name, settings={"number_of_replicas": 0}, mappings={"properties": FIELDS})
    return {
        "hosts": elasticsearch.url,
        "index": name,
        "key": "id",
        "timeout": 10,
    }


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(Elasticsearch(options["hosts"], index="any"))) as connected:
        yield connected


def dead_lettered(options: dict[str, Any], kind: type[Elasticsearch] = SmallRequests, **changed: Any) -> Elasticsearch:
    dead = {"on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"}
    return kind(**{**options, **dead, **changed})


def test_a_malformed_date_and_number_stop_with_index_id_reason_and_way_out(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        with pytest.raises(RowsRejected) as caught:
            rig.commit(prepared)
        shown = str(caught.value)
        assert options["index"] in shown
        for each in ("bad-number", "bad-date", "2026-13-45", "failed to parse field [n]"):
            assert each in shown
        assert "stays pending" in shown
        assert 'on_rejected="dead_letter"' in caught.value.hint
        assert rig.committer.newest() is None


def test_a_stopped_epoch_goes_on_with_dead_letters_and_loses_nothing(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        with pytest.raises(RowsRejected):
            rig.commit(prepared)
    with closing(Rig.joining(dead_lettered(options))) as other, closing(Rig(other.sink, rig.identity)) as again:
        assert again.commit(prepared).outcome is Outcome.COMMITTED
        assert again.stored() == dict(GOOD)
        assert len(again.stored(again.sink.dead_letter_index)) == len(BAD)


def test_dead_letters_hold_reason_epoch_and_source(options: dict[str, Any]) -> None:
    with closing(Rig.joining(dead_lettered(options))) as rig:
        prepared = rig.apply(4, [rendered([*GOOD, *BAD])])
        letters = {each["id"]: each for each in rig.stored(rig.sink.dead_letter_index).values()}
        assert rig.stored() == dict(GOOD)
        assert set(letters) == {"bad-number", "bad-date"}
        letter = letters["bad-date"]
        assert letter["source"] == '{"at": "2026-13-45"}'
        assert "2026-13-45" in letter["reason"]
        assert (letter["index"], letter["status"]) == (options["index"], 400)
        assert (letter["epoch"], letter["attempt"]) == (4, prepared.epoch.attempt)
        assert (letter["query_id"], letter["sink"]) == (rig.identity.query_id, rig.identity.sink)
        assert rig.committer.newest() == 4


def test_dead_letters_are_written_once_however_often_the_epoch_is_applied(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Rig.joining(dead_lettered(options))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        for point in ("elasticsearch.bulk.between", "elasticsearch.marker.before"):
            _break_off_at(monkeypatch, point)
            with pytest.raises(KeyboardInterrupt):
                rig.commit(prepared)
        monkeypatch.undo()
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert len(rig.stored(rig.sink.dead_letter_index)) == len(BAD)


def test_a_document_accepted_by_a_later_run_is_no_dead_letter_any_more(
    options: dict[str, Any], client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.indices.put_mapping(index=options["index"], dynamic="strict")
    with closing(Rig.joining(dead_lettered(options), pa.schema([("n", pa.int64())]))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, ("late", {"new": 1}), ("bad", {"n": "x"})])])
        _break_off_at(monkeypatch, "elasticsearch.marker.before")
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
        monkeypatch.undo()
        assert len(rig.stored(rig.sink.dead_letter_index)) == 2
        client.indices.put_mapping(index=options["index"], properties={"new": {"type": "long"}})
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert [each["id"] for each in rig.stored(rig.sink.dead_letter_index).values()] == ["bad"]
        assert rig.stored()["late"] == {"new": 1}


def test_a_driver_that_wakes_up_leaves_its_successors_dead_letters(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Rig.joining(dead_lettered(options))) as rig, closing(rig.another_driver()) as successor:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        slept: list[dict[str, Any]] = []

        def sleep(point: str) -> None:
            if point == "elasticsearch.bulk.between" and not slept:
                slept.append({})
                assert successor.commit(prepared).outcome is Outcome.COMMITTED
                slept[0] = rig.stored(rig.sink.dead_letter_index)

        monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", sleep)
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert rig.stored(rig.sink.dead_letter_index) == slept[0]
        assert {each["id"] for each in slept[0].values()} == {name for name, _ in BAD}
        assert len(slept[0]) == len(BAD)


def test_letters_of_a_broken_off_run_are_cleared_away_by_who_finds_the_epoch_applied(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver that wrote the marker was killed before it could clear away."""
    with closing(Rig.joining(dead_lettered(options))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        _break_off_at(monkeypatch, "elasticsearch.marker.before")
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
        monkeypatch.undo()
        monkeypatch.setattr("epochsink.elasticsearch.dead_letter.forget_other_runs", _killed)
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
        assert len(rig.stored(rig.sink.dead_letter_index)) == 2 * len(BAD)
        monkeypatch.undo()
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert len(rig.stored(rig.sink.dead_letter_index)) == len(BAD)


def test_a_superseding_driver_that_loses_the_race_clears_its_own_letters_away(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first driver, which has voted on the epoch and applies it once, looks for nobody's letters."""
    with closing(Rig.joining(dead_lettered(options))) as rig, closing(rig.another_driver()) as successor:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        overtaken: list[str] = []

        def overtake(point: str) -> None:
            if point == "elasticsearch.marker.before" and not overtaken:
                overtaken.append(point)
                assert rig.commit(prepared).outcome is Outcome.COMMITTED

        monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", overtake)
        assert successor.commit(prepared).outcome is Outcome.COMMITTED
        assert overtaken
        assert len(rig.stored(rig.sink.dead_letter_index)) == len(BAD)


def test_a_small_epoch_takes_six_requests_and_none_searches_for_dead_letters(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison before it included."""
    monkeypatch.setattr("epochsink.elasticsearch.committer._JUST_READ_SECONDS", 60.0)  # also on a busy machine
    with Proxy(options["hosts"], lambda _: None) as proxy:
        sink = dead_lettered(options, Elasticsearch, hosts=proxy.url, refresh=True)
        with closing(Rig.joining(sink)) as rig:
            first = rig.apply(0, [rendered(GOOD)])
            done = LastDone(0, first.epoch.attempt, (first.part,))
            # which also looks at the index, once for a start
            rig.committer.verify_applied(done, None)
            prepared = rig.prepare(1, [rendered(GOOD)], after=done)
            proxy.seen.clear()
            rig.committer.verify_applied(done, LastDone(1, prepared.epoch.attempt, (prepared.part,)))
            assert rig.commit(prepared, done).outcome is Outcome.COMMITTED
            key = identity_key(rig.identity)
            claim, marker = (f"/epochsink-markers/_doc/{name(key)}" for name in (claim_document, marker_document))
            index = f"/{sink.index}"
    asked = [(each.method, each.path.partition("?")[0]) for each in proxy.seen]
    assert asked[0] == ("GET", marker)
    # one look at all indices that are written to; beside each other
    look = ("GET", f"{index},epochsink-markers,{sink.dead_letter_index}")
    assert sorted(asked[1:3]) == [look, ("PUT", claim)]
    assert asked[3:] == [("PUT", f"{index}/_bulk"), look, ("PUT", marker)]


def test_a_marker_that_was_compared_a_while_ago_is_read_again(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        first = rig.apply(0, [rendered(GOOD)])
        done = LastDone(0, first.epoch.attempt, (first.part,))
        prepared = rig.prepare(1, [rendered([("later", {"n": 1})])], after=done)
        rig.committer.verify_applied(done, None)
        time.sleep(0.1)
        client.delete(index="epochsink-markers", id=marker_document(identity_key(rig.identity)))
        with pytest.raises(WentBack):
            rig.commit(prepared, done)
        # the write of the marker would have noticed it too, after the documents
        assert rig.stored() == dict(GOOD)


def _killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_dead_letter_index_that_refuses_stops_the_query(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    sink = dead_lettered(options)
    client.indices.create(index=sink.dead_letter_index or "", mappings={"dynamic": "strict"})
    with closing(OneSink.of(sink)) as committer:
        assert committer.check(SCHEMA) == []
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, *BAD])])
        with pytest.raises(RowsRejected, match="dead-letter index"):
            rig.commit(prepared)
        assert rig.committer.newest() is None


def test_a_fault_of_the_index_sets_no_document_aside(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    with closing(Rig.joining(dead_lettered(options))) as rig:
        prepared = rig.prepare(0, [rendered(GOOD)])
        client.indices.put_settings(index=options["index"], settings={"index.default_pipeline": "nowhere"})
        with pytest.raises(RowsRejected, match=r"even an empty document.*nowhere"):
            rig.commit(prepared)
        assert rig.stored(rig.sink.dead_letter_index) == {}
        client.indices.put_settings(index=options["index"], settings={"index.default_pipeline": None})
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert rig.stored() == dict(GOOD)


def test_a_pipeline_that_is_gone_sets_no_document_aside_also_if_the_user_may_not_ask_for_pipelines(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    forbidden = Answer(403, b'{"error":{"type":"security_exception","reason":"no"},"status":403}')
    with (
        Proxy(options["hosts"], lambda seen: forbidden if "/_ingest/" in seen.path else None) as proxy,
        closing(Rig.joining(dead_lettered(options, hosts=proxy.url))) as rig,
    ):
        prepared = rig.prepare(0, [rendered(GOOD)])
        client.indices.put_settings(index=options["index"], settings={"index.default_pipeline": "nowhere"})
        with pytest.raises(RowsRejected, match=r"even an empty document.*nowhere"):
            rig.commit(prepared)
        assert rig.stored(rig.sink.dead_letter_index) == {}


def test_a_document_larger_than_the_server_takes_is_refused_before_the_checkpoint(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        with pytest.raises(RowsRejected, match=r"http\.max_content_length") as caught:
            rig.prepare(0, [rendered([*GOOD, ("huge", {"text": "x" * 104_900_000})])])
        assert "where=" in caught.value.hint
        assert rig.stored() == {}


def test_a_document_too_large_for_a_proxy_stops_at_the_commit_and_is_never_dropped(options: dict[str, Any]) -> None:
    def behave(seen: Seen) -> Answer | None:
        return Answer(413) if seen.is_bulk and len(seen.body) > 400 else None

    with Proxy(options["hosts"], behave) as proxy, closing(Rig.joining(dead_lettered(options, hosts=proxy.url))) as rig:
        prepared = rig.prepare(0, [rendered([*GOOD, ("huge", {"text": "x" * 500})])])
        with pytest.raises(RowsRejected, match="too large for any index"):
            rig.commit(prepared)
        proxy.behave = lambda _: None
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert "huge" in rig.stored()


def scattered(size: int) -> str:
    """Return a text that no compression makes much shorter."""
    return base64.b85encode(random.Random(size).randbytes(size * 4 // 5)).decode()


@pytest.mark.parametrize("lettered", [False, True], ids=["stop", "dead letters"])
def test_a_document_that_a_proxy_does_not_take_is_refused_before_the_checkpoint(
    options: dict[str, Any], *, lettered: bool
) -> None:
    """With dead letters, if its letter is too large as well. The first document of a length is sent, no other one."""
    limit = 1_500_000
    dead = {"on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"} if lettered else {}
    with Proxy(options["hosts"], lambda seen: Answer(413) if len(seen.body) > limit else None) as proxy:
        sink = Elasticsearch(**{**options, "hosts": proxy.url, **dead})
        with closing(Rig.joining(sink, pa.schema([("text", pa.string())]))) as rig:
            for name in ("fits", "fits as well"):
                rig.prepare(0, [rendered([*GOOD, (name, {"text": scattered(1_200_000)})])])
            assert sum(len(seen.body) > 1_000_000 for seen in proxy.seen) == 1
            with pytest.raises(RowsRejected, match="more than a proxy in front of the server accepts") as refused:
                rig.prepare(0, [rendered([*GOOD, ("huge", {"text": scattered(2_000_000)})])])
            assert "limit of the proxy" in refused.value.hint
            assert rig.stored() == {}


def test_a_document_that_a_proxy_does_not_take_is_set_aside_if_its_letter_is_smaller(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    text = "x" * 1_200_000
    client.indices.put_mapping(index=options["index"], properties={"text": {"type": "text", "index": False}})
    with Proxy(options["hosts"], lambda seen: Answer(413) if len(seen.body) > 1_000_000 else None) as proxy:
        sink = dead_lettered(options, Elasticsearch, hosts=proxy.url)
        with closing(Rig.joining(sink, pa.schema([("n", pa.int64()), ("text", pa.string())]))) as rig:
            rig.apply(0, [rendered([*GOOD, ("huge", {"text": text})])])
            (letter,) = rig.stored(sink.dead_letter_index).values()
            assert len(letter["source"]) == 100_000
            letters = rig.committer.participant.operator().letters("search")
            assert letters.retry(Chosen()).kept == 1
            assert letters.read(Chosen(), 1)[0].row["document"] == letter["source"]
            proxy.behave = lambda _: None
            assert letters.retry(Chosen()).written == 1
            assert rig.stored() == {**dict(GOOD), "huge": {"text": text}}


def test_a_document_above_the_indexing_pressure_is_judged_at_the_vote(
    client: vendor.Elasticsearch, options: dict[str, Any]
) -> None:
    stats = client.nodes.stats(metric="indexing_pressure")["nodes"].values()
    limit = min(each["indexing_pressure"]["memory"]["limit_in_bytes"] for each in stats)
    content = client.nodes.info(metric="http")["nodes"].values()
    preflight.refuse_too_large(ElasticsearchServer(client), limit // 2)
    assert limit < min(each["http"]["max_content_length_in_bytes"] for each in content)
    written = WrittenTask(uuid.uuid4().hex, len(GOOD), limit + 1)
    rows = ListedRows({written.task: [rendered(GOOD)]})
    with (
        closing(Rig.joining(SmallRequests(**options))) as rig,
        pytest.raises(RowsRejected, match=r"indexing_pressure\.memory\.limit"),
    ):
        rig.committer.vote(Epoch(0, uuid.uuid4().hex), [written.to_json()], rows)


def test_a_term_too_long_for_a_keyword_is_set_aside_with_its_whole_source(options: dict[str, Any]) -> None:
    with closing(Rig.joining(dead_lettered(options))) as rig:
        rig.apply(0, [rendered([*GOOD, ("long", {"id": "x" * 40_000})])])
        (letter,) = rig.stored(rig.sink.dead_letter_index).values()
        assert len(letter["source"]) > 40_000


def test_validation_finds_refused_documents_before_the_checkpoint_and_writes_nothing(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options, validate=True))) as rig:
        rig.apply(0, [rendered([("good0", {"n": -1})])])
        with pytest.raises(RowsRejected, match="before the checkpoint") as caught:
            rig.prepare(1, [rendered(GOOD), rendered(BAD)])
        assert "bad-date" in str(caught.value)
        assert "2026-13-45" in str(caught.value)
        assert rig.stored() == {"good0": {"n": -1}}
        prepared = rig.prepare(1, [rendered([*GOOD, ("gone", None)])])
        assert rig.stored() == {"good0": {"n": -1}}
        rig.commit(prepared)
        assert rig.stored() == dict(GOOD)


def test_validation_that_cannot_be_had_fails_the_task(options: dict[str, Any]) -> None:
    def behave(seen: Seen) -> Answer | None:
        return Answer(503) if seen.is_bulk and b"if_seq_no" in seen.body and b"good" in seen.body else None

    changed = {**options, "validate": True, "timeout": 0.4}
    with Proxy(options["hosts"], behave) as proxy:
        sink = SmallRequests(**{**changed, "hosts": proxy.url})
        with closing(Rig.joining(sink)) as rig, pytest.raises(PrepareFailed, match="could not validate"):
            rig.prepare(0, [rendered(GOOD)])


@pytest.mark.parametrize(("document_id", "shown"), [("", "''"), ("é" * 257, "éé")])
def test_an_id_that_no_server_takes_is_refused_by_the_task(
    options: dict[str, Any], document_id: str, shown: str
) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        with pytest.raises(RowsRejected, match="1 to 512 bytes") as caught:
            rig.prepare(0, [rendered([*GOOD, (document_id, {"n": 1})])])
        assert shown in str(caught.value)
        rig.apply(0, [rendered([("é" * 256, {"n": 1}), ('"' * 512, {"n": 2})])])
        assert len(rig.stored()) == 2


def _break_off_at(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    def reach(point: str) -> None:
        if point == wanted:
            raise KeyboardInterrupt

    monkeypatch.setattr("epochsink.elasticsearch.apply.failpoints.reach", reach)


def without_keys(
    *documents: tuple[str | None, dict[str, Any] | None], ranks: list[int] | None = None
) -> pa.RecordBatch:
    """Return a record batch with rows whose key is NULL, as the JVM renders them."""
    batch = rendered([(key or "", document) for key, document in documents], ranks)
    ends = [end if key is not None else "}" for (key, _), end in zip(documents, batch["id"].to_pylist(), strict=True)]
    return batch.set_column(0, "id", pa.array(ends))


@pytest.mark.parametrize("ranked", [False, True], ids=["plain", "ranked"])
def test_each_row_without_a_valid_key_is_a_letter_and_no_other_row_replaces_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, ranked: bool
) -> None:
    """Also if the epoch is broken off and applied again: NULL, empty and too long keys, in several tasks."""
    order_by = "n" if ranked else None
    sink = dead_lettered(options, order_by=order_by)
    with closing(Rig.joining(sink)) as rig:
        first: list[Any] = [*GOOD, (None, {"n": 1}), (None, {"n": 1}), ("", {"n": 2}), (None, None)]
        second: list[Any] = [("k" * 513, {"n": 3}), (None, {"n": 4}), ("twice", {"n": 5}), ("twice", {"n": 6})]
        tasks = [[without_keys(*each, ranks=list(range(len(each))) if ranked else None)] for each in (first, second)]
        prepared = rig.prepare(0, *tasks)
        _break_off_at(monkeypatch, "elasticsearch.marker.before")
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
        monkeypatch.undo()
        verdict = rig.commit(prepared)
        assert (verdict.outcome, verdict.set_aside) == (Outcome.COMMITTED, 6)
        assert rig.stored() == {**dict(GOOD), "twice": {"n": 6}}
        letters = rig.stored(rig.sink.dead_letter_index).values()
        assert sorted(str(each["source"]) for each in letters) == sorted(
            ['{"n": 1}', '{"n": 1}', '{"n": 2}', '{"n": 3}', '{"n": 4}', "None"]
        )
        assert {(each["id"], each["error"]) for each in letters} == {(None, "invalid_key")}
        assert "its key is NULL" in next(each["reason"] for each in letters if each["source"] == '{"n": 4}')
        # they have no _id with which they could be written
        assert rig.committer.participant.operator().letters("search").retry(Chosen()).kept == 6


def test_rows_without_a_valid_routing_become_letters(options: dict[str, Any]) -> None:
    with closing(Rig.joining(dead_lettered(options, routing="region"))) as rig:
        batch = rendered([("a", {"n": 1}), ("b", {"n": 2})], routings=["eu", ""])
        rig.apply(0, [batch])
        assert rig.stored() == {"a": {"n": 1}}
        (letter,) = rig.stored(rig.sink.dead_letter_index).values()
        assert "routing of a row is empty" in letter["reason"]


@pytest.mark.parametrize("keyed", [False, True], ids=["no-key", "key"])
def test_rows_with_a_map_that_no_index_takes_are_letters_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    """Beside rows without a key, and if the epoch is broken off: the newest row of an id counts, whatever its maps."""
    wrong = "map column 'm': {}\n" + json.dumps({"n": 9})
    batch = rendered([("a", {"n": 1}), ("b", {"n": 2}), ("b", {}), ("", {"n": 3}), ("c", {"n": 4})])
    sources = batch["source"].to_pylist()
    batch = batch.set_column(1, "source", pa.array([sources[0], sources[1], wrong, wrong, None if keyed else wrong]))
    sink = dead_lettered(options, key="id" if keyed else None)
    with closing(Rig.joining(sink)) as rig:
        prepared = rig.prepare(0, [batch if keyed else batch.select(["source"])])
        _break_off_at(monkeypatch, "elasticsearch.marker.before")
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
        monkeypatch.undo()
        letters = rig.stored(sink.dead_letter_index).values
        assert rig.commit(prepared).set_aside == len(letters()) == (2 if keyed else 3)
        assert {each["source"] for each in letters()} == {'{"n": 9}'}
        assert sorted(each["n"] for each in rig.stored().values()) == ([1] if keyed else [1, 2])
        errors = sorted((each["error"], each["id"]) for each in letters())
        assert errors == ([("invalid_key", None), ("invalid_map", "b")] if keyed else [("invalid_map", None)] * 3)
        assert rig.committer.participant.operator().letters("search").retry(Chosen()).kept == len(letters())


def test_more_rows_without_a_key_than_the_limit_stop_the_query_before_the_decision(options: dict[str, Any]) -> None:
    with closing(Rig.joining(dead_lettered(options, letters_limit=0.25))) as rig:
        rig.apply(0, [without_keys(*GOOD, (None, {"n": 1}))])
        with pytest.raises(RowsRejected, match=r"2 of 4 rows have no valid _id or routing, or a value"):
            rig.prepare(1, [without_keys(*GOOD[:2], (None, {}), (None, {}))])
        assert rig.committer.newest() == 0


def test_rows_without_a_key_still_stop_a_query_without_dead_letters(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        with pytest.raises(RowsRejected, match="its key is NULL") as refused:
            rig.prepare(0, [without_keys(*GOOD, (None, {}))])
        assert "dead_letter" in refused.value.hint
