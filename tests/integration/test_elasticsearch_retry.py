"""A retry of dead letters writes each document once, and never over a newer one, whatever is killed."""

from __future__ import annotations

import base64
import json
import os
import signal
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_rig import Rig, keyless, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.dead_letter import decoded, forget_other_runs
from epochsink.elasticsearch.errors import NotServed, RequestRefused, UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.identity import marker_document
from epochsink.sink import Chosen, Epoch, LastDone, Outcome, Retried, identity_key
from epochsink.sink.letter_row import encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from elasticsearch_rig import Document, Prepared
    from fix_services import FreshName

    from epochsink.elasticsearch.letters import ElasticsearchLetters
    from epochsink.sink import Letter
    from epochsink_devkit.services import ElasticsearchService

ALL = Chosen()
GOOD: list[Document] = [(f"good{number}", {"n": number}) for number in range(6)]
SCHEMA = pa.schema([("n", pa.int64())])


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Return the arguments of a sink whose index refuses fields other than ``n`` until `correct`."""
    name = fresh_index()
    with closing(connect(Elasticsearch(elasticsearch.url, index=name))) as connected:
        mappings = {"dynamic": "strict", "properties": {"n": {"type": "long"}}}
        connected.indices.create(index=name, settings={"number_of_replicas": 0}, mappings=mappings)
    dead = {"on_rejected": "dead_letter", "dead_letter_index": f"{name}_dead"}
    return {"hosts": elasticsearch.url, "index": name, "key": "id", "timeout": 10, **dead}


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[vendor.Elasticsearch]:
    with closing(connect(Elasticsearch(options["hosts"], index="any"))) as connected:
        yield connected


@pytest.fixture
def rig(options: dict[str, Any]) -> Iterator[Rig]:
    with closing(Rig.joining(Elasticsearch(**options), SCHEMA)) as made:
        yield made


def correct(client: vendor.Elasticsearch, rig: Rig) -> None:
    client.indices.put_mapping(index=rig.sink.index, properties={"new": {"type": "long"}})


def letters_of(rig: Rig) -> ElasticsearchLetters:
    found: ElasticsearchLetters = rig.committer.participant.operator().letters(rig.identity.sink)
    return found


def read(rig: Rig) -> list[Letter]:
    return letters_of(rig).read(ALL, 100)


def version(client: vendor.Elasticsearch, rig: Rig, document_id: str) -> int:
    """Return how far the version of a document is above the sink's base."""
    found: int = client.get(index=rig.sink.index, id=document_id)["_version"]
    return found - int(rig.identity.origin["base"])


def test_letters_are_read_newest_first_by_epoch_and_by_id(rig: Rig) -> None:
    rig.apply(0, [rendered([*GOOD, ("a", {"new": 1})])])
    rig.apply(3, [rendered([("b", {"n": "x"}), ("c", {"new": 3})])])
    first, second, oldest = read(rig)
    assert [first.epoch, second.epoch, oldest.epoch] == [3, 3, 0]
    assert oldest.row == {"index": rig.sink.index, "_id": "a", "document": {"new": 1}}
    assert (oldest.code, oldest.pending) == ("strict_dynamic_mapping_exception", False)
    assert "[new]" in oldest.error
    letters = letters_of(rig)
    assert letters.read(Chosen((oldest.id,)), 9) == [oldest]
    assert letters.read(Chosen((oldest.id,), epoch=3), 9) == []
    assert len(letters.read(ALL, 2)) == 2
    assert (letters.count(ALL), letters.count(Chosen(epoch=3))) == (3, 2)


def test_a_retry_writes_what_the_corrected_index_takes_and_keeps_the_rest(
    rig: Rig, client: vendor.Elasticsearch
) -> None:
    rig.apply(2, [rendered([*GOOD, ("a", {"new": 1}), ("b", {"other": 1}), ("c", {"new": 3})])])
    assert letters_of(rig).retry(ALL).kept == 3
    correct(client, rig)
    done = letters_of(rig).retry(ALL)
    assert (done.written, done.superseded, done.kept) == (2, 0, 1)
    assert "[other]" in done.reason
    assert rig.stored() == dict(GOOD) | {"a": {"new": 1}, "c": {"new": 3}}
    assert version(client, rig, "a") == 2
    assert [letter.row["_id"] for letter in read(rig)] == ["b"]
    # the query goes on beside it
    rig.apply(3, [rendered([("a", {"n": 3})])])
    assert rig.stored()["a"] == {"n": 3}


def test_a_newer_document_is_never_replaced(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    """Nor is one that a later epoch deleted brought back, while the index remembers that."""
    client.indices.put_settings(index=options["index"], settings={"index.gc_deletes": "1h"})
    with closing(Rig.joining(Elasticsearch(**options, delete_when="gone"), SCHEMA)) as rig:
        rig.apply(0, [rendered([("a", {"new": 1}), ("b", {"new": 2}), ("c", {"new": 3})])])
        rig.apply(1, [rendered([("a", {"n": 1}), ("b", None)])])
        correct(client, rig)
        assert letters_of(rig).retry(ALL) == Retried(written=1, superseded=2)
        assert rig.stored() == {"a": {"n": 1}, "c": {"new": 3}}
        assert read(rig) == []
        assert "later epoch" in letters_of(rig).caution()


@pytest.mark.parametrize("deleted", [False, True], ids=["changed", "deleted"])
def test_a_letter_stays_if_only_another_program_has_raised_the_version_of_its_document(
    rig: Rig, client: vendor.Elasticsearch, *, deleted: bool
) -> None:
    """Its row is newer than what an epoch has written of that key. A row that a later epoch wrote is superseded."""
    rig.apply(0, [rendered([("a", {"n": 0}), ("b", {"n": 0})])])
    for touch in range(6):
        client.update(index=rig.sink.index, id="a", doc={"n": 100 + touch})
    if deleted:
        client.delete(index=rig.sink.index, id="a")
    rig.apply(1, [rendered([("a", {"new": 1}), ("b", {"new": 1})])])
    rig.apply(2, [rendered([("b", {"n": 2})])])
    correct(client, rig)
    done = letters_of(rig).retry(ALL)
    assert (done.written, done.superseded, done.kept) == (0, 1, 1)
    assert "above those of all applied epochs: another program has changed or deleted it" in done.reason
    assert [letter.row["_id"] for letter in read(rig)] == ["a"]
    assert rig.stored() == {"b": {"n": 2}} | ({} if deleted else {"a": {"n": 105}})
    assert "no epoch can have written it" in letters_of(rig).caution()


def test_a_deletion_that_is_forgotten_with_its_shard_is_undone_by_a_retry_which_says_so_before(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """The server keeps deleted versions in memory; after it opens a shard, it knows those since the last flush only."""
    client.indices.put_settings(index=options["index"], settings={"index.gc_deletes": "1h"})
    with closing(Rig.joining(Elasticsearch(**options, delete_when="gone"), SCHEMA)) as rig:
        rig.apply(0, [rendered([("a", {"new": 1}), ("b", {"new": 2})])])
        correct(client, rig)
        rig.apply(1, [rendered([("a", None), ("b", None)])])
        a, b = sorted(read(rig), key=lambda letter: str(letter.row["_id"]))
        assert letters_of(rig).retry(Chosen((a.id,))) == Retried(superseded=1)
        client.indices.flush(index=rig.sink.index)
        client.indices.close(index=rig.sink.index)
        client.indices.open(index=rig.sink.index)
        assert "if the primary shard has restarted or moved since" in letters_of(rig).caution()
        assert letters_of(rig).retry(Chosen((b.id,))) == Retried(written=1)
        assert rig.stored() == {"b": {"new": 2}}


@contextmanager
def rolled_over(options: dict[str, Any], client: vendor.Elasticsearch) -> Iterator[Rig]:
    """Give a sink with a letter of epoch 0, whose alias for letters has then rolled over."""
    alias = options["dead_letter_index"]
    first = f"{alias}-000001"
    with closing(Rig.joining(Elasticsearch(**{**options, "dead_letter_index": first}), SCHEMA)) as made:
        client.indices.put_alias(index=first, name=alias, is_write_index=True)
        with closing(Rig(Elasticsearch(**options), made.identity)) as rig:
            rig.apply(0, [rendered([*GOOD, ("a", {"new": 1})])])
            client.indices.rollover(alias=alias, mappings=client.indices.get_mapping(index=first)[first]["mappings"])
            yield rig


def test_letters_behind_an_alias_that_has_rolled_over_are_dropped_where_they_are(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    alias = options["dead_letter_index"]
    with rolled_over(options, client) as rig:
        (letter,) = rig.stored(alias).values()
        client.index(index=alias, id="second", document=letter)
        assert letters_of(rig).drop(ALL) == 2
        assert rig.stored(alias) == {}


def test_a_retry_is_refused_while_its_letters_are_in_several_indices(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    with rolled_over(options, client) as rig:
        with pytest.raises(PrepareFailed, match=r"dead_letter_index=.*is an alias of 2 indices"):
            letters_of(rig).retry(ALL)
        assert letters_of(rig).count(ALL) == 1


def test_letters_of_a_broken_off_run_behind_an_alias_that_has_rolled_over_are_cleared_away(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """It rolled over after the check at the start of the commit."""
    alias = options["dead_letter_index"]
    with rolled_over(options, client) as rig:
        (letter,) = rig.stored(alias).values()
        mine = dict(letter, run="mine")
        client.index(index=alias, id="mine", document=mine)
        epoch, server = Epoch(0, letter["attempt"]), ElasticsearchServer(client)
        forget_other_runs(server, alias, rig.identity, epoch, run="mine", timeout=10)
        assert rig.stored(alias) == {"mine": mine}


def test_letters_that_stay_although_the_server_accepts_their_deletion_are_an_error_and_no_endless_loop(
    rig: Rig,
) -> None:
    prepared = rig.apply(0, [rendered([("a", {"new": 1})])])
    (letter,) = rig.stored(rig.sink.dead_letter_index)
    deaf = Answer(200, b'{"errors":false,"items":[{"delete":{"status":200}}]}')
    with (
        Proxy(rig.sink.hosts[0], lambda seen: deaf if seen.is_bulk else None) as proxy,
        closing(connect(Elasticsearch(proxy.url, index="any"))) as through,
        pytest.raises(UnfitIndex, match=f"after the server has accepted to delete them, for example '{letter}'"),
    ):
        forget_other_runs(
            ElasticsearchServer(through),
            rig.sink.dead_letter_index or "",
            rig.identity,
            prepared.epoch,
            run="",
            timeout=10,
        )
    assert letters_of(rig).count(ALL) == 1


def touched(client: vendor.Elasticsearch, index: str, letter: str) -> None:
    """Change a letter as another program does, so that its deletion is refused."""
    for touch in range(3):
        client.update(index=index, id=letter, doc={"touched": touch})


def test_a_letter_of_a_broken_off_run_that_another_program_has_changed_stays_alone_and_is_named(
    rig: Rig, client: vendor.Elasticsearch
) -> None:
    dead = rig.sink.dead_letter_index or ""
    prepared = rig.apply(0, [rendered([("a", {"new": 1})])])
    (mine,) = rig.stored(dead).values()
    for name in ("first", "second", "third"):
        version = rig.identity.origin["base"]
        document = dict(mine, run="broken off")
        client.index(index=dead, id=name, document=document, version=version, version_type="external_gte")
    touched(client, dead, "first")
    with pytest.raises(UnfitIndex, match=r"1 dead letter.* another program has changed them, for example 'first'"):
        forget_other_runs(ElasticsearchServer(client), dead, rig.identity, prepared.epoch, run=mine["run"], timeout=10)
    assert sorted(each["run"] for each in rig.stored(dead).values()) == sorted(["broken off", mine["run"]])


def test_letters_that_cannot_be_deleted_are_not_said_to_be_gone(rig: Rig, client: vendor.Elasticsearch) -> None:
    rig.apply(0, [rendered([("a", {"new": 1}), ("b", {"new": 2})])])
    correct(client, rig)
    one, _ = read(rig)
    touched(client, rig.sink.dead_letter_index or "", one.id)
    done = letters_of(rig).retry(ALL)
    assert (done.written, done.superseded, done.kept) == (1, 0, 1)
    assert "its row is written, but the letter cannot be deleted" in done.reason
    assert rig.stored() == {"a": {"new": 1}, "b": {"new": 2}}
    assert letters_of(rig).drop(ALL) == 0
    assert letters_of(rig).count(ALL) == 1


@pytest.mark.parametrize("where", ["_refresh", "_search"])
def test_letters_of_which_a_shard_is_not_available_are_an_error_and_not_fewer(
    options: dict[str, Any], client: vendor.Elasticsearch, where: str
) -> None:
    """A refresh leaves such a shard out, and so does a search, unless it says that it wants all."""
    dead = options["dead_letter_index"]
    partly = {
        "_refresh": {"_shards": {"total": 2, "successful": 1, "failed": 0}},
        "_search": {"hits": {"total": {"value": 0, "relation": "eq"}, "hits": []}, "pit_id": "any"},
    }

    def behave(seen: Seen) -> Answer | None:
        if f"/{where}" not in seen.path:
            return None
        if "allow_partial_search_results=false" in seen.path:
            return Answer(503, b'{"error":{"type":"search_phase_execution_exception","reason":"no"},"status":503}')
        return Answer(200, json.dumps(partly[where]).encode())

    two = {"settings": {"number_of_shards": 2, "number_of_replicas": 0}}
    client.indices.put_index_template(name=dead, index_patterns=[dead], template=two)
    try:
        with (
            Proxy(options["hosts"], lambda _: None) as proxy,
            closing(Rig.joining(Elasticsearch(**{**options, "hosts": proxy.url}), SCHEMA)) as rig,
            closing(connect(Elasticsearch(proxy.url, index="any"))) as through,
        ):
            prepared = rig.apply(0, [rendered([("a", {"new": 1})])])
            letters = letters_of(rig)
            proxy.behave = behave
            for ask in (letters.count, letters.retry, letters.drop, lambda _: read(rig)):
                with pytest.raises(PrepareFailed):
                    ask(ALL)
            with pytest.raises((NotServed, RequestRefused)):
                forget_other_runs(ElasticsearchServer(through), dead, rig.identity, prepared.epoch, run="", timeout=10)
            proxy.behave = lambda _: None
            assert letters.count(ALL) == 1
    finally:
        client.indices.delete_index_template(name=dead)


def test_only_the_chosen_letters_are_retried_or_dropped(rig: Rig, client: vendor.Elasticsearch) -> None:
    for epoch in range(3):
        rig.apply(epoch, [rendered([(f"{epoch}-{number}", {"new": number}) for number in range(2)])])
    correct(client, rig)
    newest = read(rig)[0]
    assert letters_of(rig).retry(Chosen((newest.id,))) == Retried(written=1)
    assert letters_of(rig).drop(Chosen(epoch=1)) == 2
    assert letters_of(rig).retry(Chosen(epoch=0)) == Retried(written=2)
    assert rig.stored().keys() == {"0-0", "0-1", newest.row["_id"]}
    assert letters_of(rig).drop(ALL) == 1
    assert letters_of(rig).retry(ALL) == Retried()


def test_rows_of_an_index_chosen_by_the_row_go_there(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    index = options.pop("index")
    del options["key"]
    with closing(Rig.joining(Elasticsearch(**options, index_by="day"), SCHEMA)) as rig:
        batch = keyless([{"new": 1}, {"n": 2}])
        indices = pa.array([index, "Not Valid"])
        rig.committer.begin(rig.prepare(0, [batch.append_column("index", pa.array([index] * 2))]).epoch, SCHEMA)
        rig.apply(0, [batch.append_column("index", indices)])
        assert letters_of(rig).count(ALL) == 2
        client.indices.put_mapping(index=index, properties={"new": {"type": "long"}})
        done = letters_of(rig).retry(ALL)
        assert (done.written, done.kept) == (1, 1)
        assert list(rig.stored(index).values()) == [{"new": 1}]


def daily(options: dict[str, Any], **changed: Any) -> Elasticsearch:
    """Return the sink whose rows name their index."""
    return Elasticsearch(**{**options, "index": None, "index_by": "day", **changed})


@pytest.fixture
def by_day(options: dict[str, Any], client: vendor.Elasticsearch) -> Iterator[Rig]:
    """Give a letter for the index of the options, which now takes it, and which the newest epoch does not touch."""
    older, newer = options["index"], f"{options['index']}_newer"
    client.indices.create(index=newer, settings={"number_of_replicas": 0})
    with closing(Rig.joining(daily(options), SCHEMA)) as made:
        made.apply(0, [rendered([("a", {"new": 1})], indices=[older])])
        made.apply(1, [rendered([("b", {"n": 1})], indices=[newer])])
        assert letters_of(made).count(ALL) == 1
        client.indices.put_mapping(index=older, properties={"new": {"type": "long"}})
        yield made


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 200, "result": "noop", "_version": -3},
        {"status": 201, "result": "created", "_index": "elsewhere", "_version": 1},
        {"status": 409, "_index": "elsewhere", "error": {"type": "version_conflict_engine_exception", "reason": "-"}},
    ],
    ids=["dropped", "moved", "moved before"],
)
def test_a_retry_looks_at_the_answers_also_of_an_index_that_the_newest_epoch_did_not_touch(
    options: dict[str, Any], by_day: Rig, answer: dict[str, Any]
) -> None:
    """The development server has no processors, so a proxy answers as a server whose pipeline takes the document."""
    older = options["index"]

    def takes(seen: Seen) -> Answer | None:
        if not (seen.is_bulk and older.encode() in seen.body):
            return None
        items = [{"index": {"_index": older, "_id": each, **answer}} for each in seen.ids]
        told = {"items": items} if "items" in seen.path else {}
        return Answer(200, json.dumps({"errors": "error" in answer, **told}).encode())

    with (
        Proxy(options["hosts"], takes) as proxy,
        closing(Rig(daily(options, hosts=proxy.url), by_day.identity)) as through,
        pytest.raises(PrepareFailed, match=f"pipeline of index '{older}' has dropped 1 of 1"),
    ):
        letters_of(through).retry(ALL)
    assert letters_of(by_day).count(ALL) == 1
    assert letters_of(by_day).retry(ALL) == Retried(written=1)
    assert by_day.stored(older) == {"a": {"new": 1}}


def test_a_retry_keeps_letters_for_what_has_become_an_alias_and_writes_the_others(
    options: dict[str, Any], client: vendor.Elasticsearch, by_day: Rig
) -> None:
    older, gone = options["index"], f"{options['index']}_gone"
    client.indices.create(index=gone, mappings={"dynamic": "strict"}, settings={"number_of_replicas": 0})
    by_day.apply(2, [rendered([("c", {"new": 2})], indices=[gone])])
    by_day.apply(3, [rendered([("b", {"n": 2})], indices=[f"{older}_newer"])])
    client.indices.delete(index=gone)
    client.indices.put_alias(index=older, name=gone)
    done = letters_of(by_day).retry(ALL)
    assert (done.written, done.kept) == (1, 1)
    assert f"index_by= gives '{gone}', an alias" in done.reason
    assert by_day.stored(older) == {"a": {"new": 1}}


def test_a_retry_refuses_an_index_that_forgets_also_one_that_the_newest_epoch_did_not_touch(
    options: dict[str, Any], client: vendor.Elasticsearch, by_day: Rig
) -> None:
    older, durability = options["index"], "index.translog.durability"
    client.indices.put_settings(index=older, settings={durability: "async"})
    with pytest.raises(PrepareFailed, match=f"index '{older}' has {durability}=async"):
        letters_of(by_day).retry(ALL)
    assert letters_of(by_day).count(ALL) == 1
    client.indices.put_settings(index=older, settings={durability: None})
    assert letters_of(by_day).retry(ALL) == Retried(written=1)


def test_a_document_that_another_program_has_changed_a_little_is_replaced_as_the_command_has_said(
    rig: Rig, client: vendor.Elasticsearch
) -> None:
    """The version is all that tells, and each change raises it by one: to no more than that of a later epoch."""
    rig.apply(0, [rendered([("a", {"n": 0})])])
    client.update(index=rig.sink.index, id="a", doc={"n": 100})
    rig.apply(5, [rendered([("a", {"new": 5})])])
    correct(client, rig)
    assert "after fewer changes by another program it is replaced" in letters_of(rig).caution()
    assert letters_of(rig).retry(ALL) == Retried(written=1)
    assert rig.stored() == {"a": {"new": 5}}


def test_letters_that_the_server_has_not_answered_for_are_not_kept(options: dict[str, Any], rig: Rig) -> None:
    """The row would be nowhere: a proxy, for example, answers to less than was sent."""
    dead = rig.sink.dead_letter_index or ""
    none = Answer(200, b'{"errors":false,"items":[]}')
    with (
        Proxy(rig.sink.hosts[0], lambda seen: none if seen.is_bulk and f"/{dead}/" in seen.path else None) as proxy,
        closing(Rig(Elasticsearch(**{**options, "hosts": proxy.url}), rig.identity)) as through,
    ):
        prepared = through.prepare(0, [rendered([*GOOD, ("a", {"new": 1})])])
        with pytest.raises(OutcomeUnknown, match="1 operations were sent, and the answer has 0"):
            through.commit(prepared)
    assert rig.commit(prepared).set_aside == 1


def test_two_letters_of_one_document_write_the_newer_row_and_say_so(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """An operator may have copied letters together. The order is that of order_by, not that of the letters."""
    with closing(Rig.joining(Elasticsearch(**options, order_by="at"), SCHEMA)) as rig:
        rig.apply(0, [rendered([("a", {"new": 2}), ("b", {"new": 3})], ranks=[2, 3])])
        dead = rig.sink.dead_letter_index or ""
        client.indices.refresh(index=dead)
        for hit in client.search(index=dead, query={"term": {"id": "a"}})["hits"]["hits"]:
            older = rendered([("a", {"new": 1})], ranks=[1])
            row = base64.b64encode(zlib.compress(encode_row(older))).decode()
            client.index(index=dead, id="~copy", document=hit["_source"] | {"row": row, "source": "for people"})
        correct(client, rig)
        assert letters_of(rig).retry(ALL) == Retried(written=2, superseded=1)
        assert rig.stored() == {"a": {"new": 2}, "b": {"new": 3}}
        assert letters_of(rig).count(ALL) == 0


def test_a_letter_holds_the_row_as_the_writer_was_given_it_and_a_retry_reads_nothing_else(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    with closing(Rig.joining(Elasticsearch(**options, order_by="at", routing="r"), SCHEMA)) as rig:
        given = rendered([("a", {"new": 1}), ("b", {"n": 1})], ranks=[7, None], routings=["x", "y"])
        rig.apply(0, [given])
        ((name, letter),) = rig.stored(rig.sink.dead_letter_index).items()
        assert decoded(letter).equals(given.slice(0, 1))
        document = letter | {"source": "{}", "id": "other", "routing": "other"}
        version = rig.identity.origin["base"]
        client.index(
            index=rig.sink.dead_letter_index or "",
            id=name,
            document=document,
            version=version,
            version_type="external_gte",
        )
        correct(client, rig)
        assert letters_of(rig).retry(ALL) == Retried(written=1)
        assert client.get(index=rig.sink.index, id="a", routing="x")["_source"] == {"new": 1}


@pytest.mark.parametrize("row", [None, "bm9uZQ==", "?"], ids=["none", "no Arrow", "no base64"])
def test_a_letter_whose_row_cannot_be_read_stays_and_the_others_are_written(
    rig: Rig, client: vendor.Elasticsearch, row: str | None
) -> None:
    rig.apply(0, [rendered([("a", {"new": 1}), ("b", {"new": 2})])])
    client.indices.refresh(index=rig.sink.dead_letter_index)
    (a,) = client.search(index=rig.sink.dead_letter_index, query={"term": {"id": "a"}})["hits"]["hits"]
    other = a["_source"] | {"row": row}
    client.index(index=rig.sink.dead_letter_index or "", id=a["_id"], document=other)
    client.indices.refresh(index=rig.sink.dead_letter_index)
    correct(client, rig)
    done = letters_of(rig).retry(ALL)
    assert (done.written, done.kept) == (1, 1)
    assert "its row cannot be read" in done.reason
    assert rig.stored() == {"b": {"new": 2}}


def test_a_number_that_readers_round_is_listed_as_text(rig: Rig) -> None:
    exact = '{"new": 12345678901234567.0123456789, "x": 0.5}'
    batch = rendered([("a", {})])
    rig.apply(0, [batch.set_column(1, "source", pa.array([exact]))])
    (letter,) = read(rig)
    assert letter.row["document"] == {"new": "12345678901234567.0123456789", "x": 0.5}


def test_rows_whose_index_is_null_or_not_utf8_are_letters_that_say_so(options: dict[str, Any]) -> None:
    names = pa.array([options["index"].encode(), b"day-\xff", None], pa.binary())
    invalid = pa.Array.from_buffers(pa.string(), 3, names.buffers())
    batch = rendered([("a", {"n": 1}), ("b", {"n": 2}), ("c", {"n": 3})]).append_column("index", invalid)
    with closing(Rig.joining(daily(options), SCHEMA)) as rig:
        rig.apply(0, [batch])
        assert rig.stored(options["index"]) == {"a": {"n": 1}}
        indices = {letter.row["_id"]: letter.row["index"] for letter in read(rig)}
        assert indices == {"b": "day-\\xff", "c": None}
        assert letters_of(rig).retry(ALL).kept == 2
    plain = {name: value for name, value in options.items() if name not in {"on_rejected", "dead_letter_index"}}
    with (
        closing(Rig.joining(daily(plain), SCHEMA)) as rig,
        pytest.raises(RowsRejected, match=r"index 'day-\\\\xff'"),
    ):
        rig.prepare(0, [batch.slice(0, 2)])


def test_the_limit_is_the_share_as_it_is_written(options: dict[str, Any]) -> None:
    """The product of floats is 28.999999999999996."""
    rows: list[Document] = [(f"{number}", {"n": 1} if number >= 29 else {"other": 1}) for number in range(100)]
    with closing(Rig.joining(Elasticsearch(**options, letters_limit=0.29), SCHEMA)) as rig:
        rig.apply(0, [rendered(rows)])
        assert letters_of(rig).count(ALL) == 29


def test_a_retry_writes_to_no_index_that_is_not_for_documents(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    index, dead = options["index"], options["dead_letter_index"]
    wrong = ["Not Valid", "_leading", "-", "", dead, "epochsink-markers"]
    with closing(Rig.joining(daily(options), SCHEMA)) as rig:
        documents: list[Document] = [(f"wrong{number}", {"n": 1}) for number in range(len(wrong))]
        rig.apply(0, [rendered([*documents, ("a", {"new": 1})], indices=[*wrong, index])])
        client.indices.put_mapping(index=index, properties={"new": {"type": "long"}})
        done = letters_of(rig).retry(ALL)
        assert (done.written, done.kept) == (1, len(wrong))
        assert "there is no index" in done.reason
        assert letters_of(rig).count(ALL) == len(wrong)
        assert not client.exists(index="epochsink-markers", id=f"wrong{len(wrong) - 1}")
        assert not client.exists(index=dead, id=f"wrong{len(wrong) - 2}")


def test_an_index_that_was_made_anew_gets_no_letters(rig: Rig, client: vendor.Elasticsearch) -> None:
    rig.apply(0, [rendered([("a", {"new": 1})])])
    client.indices.delete(index=rig.sink.index)
    client.indices.create(index=rig.sink.index)
    with pytest.raises(WentBack, match="is not the one that epoch 0 was applied to"):
        letters_of(rig).retry(ALL)
    assert letters_of(rig).count(ALL) == 1
    # nothing is accepted, or only an earlier epoch
    for done in (LastDone(0, "a", ({},)), LastDone(-1, "", ())):
        letters = letters_of(rig)
        letters.applied = done
        with pytest.raises(WentBack):
            letters.retry(ALL)


def accepted(rig: Rig, epoch: int) -> ElasticsearchLetters:
    """Return the letters as the command has them after ``epochsink accept``."""
    letters = letters_of(rig)
    letters.applied = LastDone(epoch, "", ())
    return letters


def test_an_index_that_an_operator_has_accepted_gets_letters(rig: Rig, client: vendor.Elasticsearch) -> None:
    rig.apply(0, [rendered([("a", {"new": 1})])])
    client.indices.delete(index=rig.sink.index)
    client.indices.create(index=rig.sink.index)
    assert accepted(rig, 0).retry(ALL) == Retried(written=1)
    assert rig.stored() == {"a": {"new": 1}}


def test_an_accepted_index_chosen_by_the_row_gets_letters_also_if_another_one_is_gone(
    options: dict[str, Any], client: vendor.Elasticsearch, by_day: Rig
) -> None:
    client.indices.delete(index=f"{options['index']}_newer")
    with pytest.raises(WentBack):
        letters_of(by_day).retry(ALL)
    assert accepted(by_day, 1).retry(ALL) == Retried(written=1)
    assert by_day.stored(options["index"]) == {"a": {"new": 1}}


def killed(rig: Rig, point: str) -> None:
    """Retry all letters in a child that kills itself at ``point``."""
    child = os.fork()
    if child == 0:
        try:
            os.environ["EPOCHSINK_FAILPOINT"] = point
            letters_of(rig.another_driver()).retry(ALL)
        finally:
            os._exit(3)  # the point was not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was never reached: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only ever uses a client of its own
@pytest.mark.parametrize("key", ["id", None])
def test_a_retry_that_is_killed_before_the_letters_are_deleted_is_repeated_exactly(
    key: str | None, options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    with closing(Rig.joining(Elasticsearch(**{**options, "key": key}), SCHEMA)) as rig:
        documents = [{"n": 1}, {"new": 2}, {"new": 3}]
        named: list[Document] = [(f"k{number}", each) for number, each in enumerate(documents)]
        rig.apply(0, [rendered(named) if key else keyless(documents)])
        correct(client, rig)
        killed(rig, "elasticsearch.letters.written")
        stored = rig.stored()
        assert (sorted(map(str, stored.values())), letters_of(rig).count(ALL)) == (sorted(map(str, documents)), 2)
        assert letters_of(rig).retry(ALL) == Retried(written=2)
        assert (rig.stored(), letters_of(rig).count(ALL)) == (stored, 0)


def test_two_retries_at_once_write_each_document_once(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    """The second one may write it again, as the same document."""
    with closing(Rig.joining(Elasticsearch(**{**options, "key": None}), SCHEMA)) as rig:
        rig.apply(0, [keyless([{"new": number} for number in range(700)])])
        correct(client, rig)
        rigs = [rig.another_driver() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            done = list(pool.map(lambda one: letters_of(one).retry(ALL), rigs))
        for one in rigs:
            one.close()
        assert sum(each.kept + each.superseded for each in done) == 0
        assert sorted(each["new"] for each in rig.stored().values()) == list(range(700))
        assert letters_of(rig).count(ALL) == 0


def broken_off(rig: Rig, monkeypatch: pytest.MonkeyPatch, epoch: int) -> Prepared:
    """Prepare an epoch of a refused row, and break its commit off after the letter, before the marker."""

    def stop(point: str) -> None:
        if point == "elasticsearch.marker.before":
            raise KeyboardInterrupt

    prepared = rig.prepare(epoch, [rendered([("a", {"new": epoch})])])
    with monkeypatch.context() as patched:
        patched.setattr("epochsink.elasticsearch.apply.failpoints.reach", stop)
        with pytest.raises(KeyboardInterrupt):
            rig.commit(prepared)
    assert next((letter.epoch, letter.pending) for letter in read(rig)) == (epoch, True)
    return prepared


def test_letters_of_a_discarded_epoch_never_count(
    rig: Rig, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later epoch is applied, and an old row must not take the place of what another sink may have stored since."""
    rig.apply(0, [rendered([("kept", {"new": 0})])])
    broken_off(rig, monkeypatch, 1)
    discarded = LastDone(1, "", ())
    letters = letters_of(rig)
    letters.applied = discarded
    assert [letter.epoch for letter in letters.read(ALL, 9)] == [0]
    later = rig.prepare(2, [rendered([("b", {"n": 1})])], after=discarded)
    assert rig.commit(later, discarded).outcome is Outcome.COMMITTED
    correct(client, rig)
    assert [letter.epoch for letter in read(rig)] == [0]
    assert letters_of(rig).count(ALL) == 1
    assert letters_of(rig).retry(ALL) == Retried(written=1)
    assert rig.stored() == {"kept": {"new": 0}, "b": {"n": 1}}


def test_letters_of_a_run_that_a_start_without_letters_took_the_place_of_never_count(
    options: dict[str, Any], rig: Rig, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = broken_off(rig, monkeypatch, 0)
    correct(client, rig)
    without = {name: value for name, value in options.items() if name not in {"on_rejected", "dead_letter_index"}}
    with closing(Rig(Elasticsearch(**without), rig.identity)) as plain:
        assert plain.commit(prepared).outcome is Outcome.COMMITTED
        plain.apply(1, [rendered([("a", {"n": 1})])])
    rig.apply(2, [rendered([("b", {"other": 2})])])
    assert [letter.row["_id"] for letter in read(rig)] == ["b"]
    assert letters_of(rig).retry(ALL).written == 0
    assert rig.stored() == {"a": {"n": 1}}


def test_letters_of_many_runs_and_starts_all_count_and_the_marker_names_each_run_once(
    rig: Rig, client: vendor.Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epochsink.elasticsearch.apply._MOST_RUNS", 2)
    for start in range(4):
        with closing(rig.another_driver()) as driver:
            for epoch in (2 * start, 2 * start + 1):
                driver.apply(epoch, [rendered([(f"k{epoch}", {"new": epoch})])])
        if start == 1:
            assert letters_of(rig).drop(Chosen(epoch=0)) == 1
            assert letters_of(rig).drop(Chosen(epoch=1)) == 1
    marker = client.get(index="epochsink-markers", id=marker_document(identity_key(rig.identity)))["_source"]
    assert sorted(marker["letters"].values()) == [3, 5, 7]
    correct(client, rig)
    assert letters_of(rig).retry(ALL) == Retried(written=6)
    assert rig.stored() == {f"k{epoch}": {"new": epoch} for epoch in range(2, 8)}


def test_more_letters_than_the_limit_stop_the_query_and_keep_the_letters(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """Nothing is lost: with a higher limit, or a corrected mapping, the same epoch is applied."""
    sink = Elasticsearch(**options, letters_limit=0.25)
    with closing(Rig.joining(sink, SCHEMA)) as rig:
        rig.apply(0, [rendered([*GOOD, ("a", {"new": 1}), ("b", {"new": 1})])])
        assert letters_of(rig).count(ALL) == 2
        prepared = rig.prepare(1, [rendered([*GOOD, ("a", {"new": 1}), ("b", {"new": 1}), ("c", {"new": 1})])])
        for _ in range(2):
            with pytest.raises(RowsRejected, match=r"at least 3 of 9 rows .* letters_limit=0.25") as stopped:
                rig.commit(prepared)
        assert "stays pending" in stopped.value.message
        assert "epochsink letters list" in stopped.value.hint
        assert rig.committer.newest() == 0
        pending = letters_of(rig).read(Chosen(epoch=1), 100)
        assert [letter.pending for letter in pending] == [True] * 3
        # they are the next start's: it may set others aside, or none
        assert letters_of(rig).count(Chosen(epoch=1)) == 0
        assert letters_of(rig).retry(Chosen(epoch=1)) == Retried()
        assert letters_of(rig).drop(Chosen(epoch=1)) == 0
        with closing(Rig(Elasticsearch(**options, letters_limit=0.5), rig.identity)) as later:
            verdict = later.commit(prepared)
            assert (verdict.outcome, verdict.set_aside) == (Outcome.COMMITTED, 3)
            assert [letter.pending for letter in letters_of(later).read(ALL, 100)] == [False] * 5
        assert letters_of(rig).count(Chosen(epoch=1)) == 3
        prepared = rig.prepare(2, [rendered([("d", {"new": 1})])])
        with pytest.raises(RowsRejected, match="letters_limit"):
            rig.commit(prepared)
        correct(client, rig)
        assert rig.commit(prepared).set_aside == 0
        assert letters_of(rig).read(Chosen(epoch=2), 9) == []
        rig.apply(3, [rendered([*GOOD, ("e", {"other": 1})])])
        assert letters_of(rig).read(Chosen(epoch=2), 9) == []
