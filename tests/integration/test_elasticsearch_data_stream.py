"""Rows without a key in data streams: each exactly once, wherever a rollover falls.

The development server has no API for data streams, so a bulk request makes them from an index template.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from elasticsearch_requests import OneByOne
from elasticsearch_rig import ListedRows, Rig, keyless, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.errors import OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.identity import claim_document
from epochsink.sink import Chosen, Epoch, LastDone, Outcome, Retried, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import elasticsearch as vendor
    from fix_services import FreshName

    from epochsink.elasticsearch.letters import ElasticsearchLetters
    from epochsink_devkit.services import ElasticsearchService

SCHEMA = pa.schema([("@timestamp", pa.timestamp("us", tz="UTC")), ("n", pa.int64())])
AT = "2026-11-22T06:30:00.000000Z"


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    return {"hosts": elasticsearch.url, "index": fresh_index("logs"), "timeout": 20.0}


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[vendor.Elasticsearch]:
    """Make the data stream: its backing index has one shard, and the longs ``n``."""
    with closing(connect(Elasticsearch(**options))) as connected:
        name = options["index"]
        template = {
            "settings": {"number_of_replicas": 0},
            "mappings": {"properties": {"n": {"type": "long"}, "@timestamp": {"type": "date"}}},
        }
        connected.indices.put_index_template(name=name, index_patterns=[name], data_stream={}, template=template)
        made = connected.bulk(index=name, operations=[{"create": {}}, {"n": "no number"}])
        assert made["errors"]
        assert backing(connected, name) == [made["items"][0]["create"]["_index"]]
        yield connected


def backing(client: vendor.Elasticsearch, name: str) -> list[str]:
    answer = client.perform_request("GET", f"/_resolve/index/{name}", headers={"accept": "application/json"})
    (stream,) = answer.body["data_streams"]
    return list(stream["backing_indices"])


def rows(first: int, last: int) -> pa.RecordBatch:
    return keyless([{"n": number, "@timestamp": AT} for number in range(first, last)])


def numbers(client: vendor.Elasticsearch, name: str) -> Counter[int]:
    """Return how often each row is in the stream."""
    client.indices.refresh(index=name)
    hits = client.search(index=name, size=10_000)["hits"]["hits"]
    return Counter(hit["_source"]["n"] for hit in hits)


def once(last: int) -> Counter[int]:
    return Counter(range(last))


def joined(sink: Elasticsearch) -> Rig:
    return Rig.joining(sink, SCHEMA)


class BreaksOff(ListedRows):
    """Rows of which a run gets those of the first ``batches`` batches, and then an error."""

    def __init__(self, whole: ListedRows, batches: int) -> None:
        super().__init__({task: list(whole.read(task)) for task in whole.tasks()})
        self._left = batches

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        for batch in super().read(task):
            if self._left == 0:
                raise InterruptedError
            self._left -= 1
            yield batch


def test_epochs_are_appended_once_also_when_they_are_committed_again_after_a_rollover(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    with closing(joined(OneByOne(**options))) as rig:
        first = rig.prepare(0, [rows(0, 20)], [rows(20, 30)])
        for _ in range(2):
            assert rig.commit(first).outcome is Outcome.COMMITTED
        client.indices.rollover(alias=options["index"])
        second = rig.prepare(1, [rows(30, 40)])
        with closing(rig.another_driver()) as other:
            assert other.commit(second).outcome is Outcome.COMMITTED
        assert rig.commit(second).outcome is Outcome.COMMITTED
        assert numbers(client, options["index"]) == once(40)


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_what_was_appended_before_a_rollover_is_not_appended_again(
    options: dict[str, Any], client: vendor.Elasticsearch, sent: int
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        rig.apply(0, [rows(0, 5)])
        batches = [rows(5, 25), rows(25, 45), rows(45, 65), rows(65, 85)]
        prepared = rig.prepare(1, batches)
        with pytest.raises(InterruptedError):
            rig.committer.commit(prepared.epoch, prepared.part, BreaksOff(prepared.rows, sent))
        before = len(numbers(client, name))
        assert (before > 5) == (sent > 0)
        client.indices.rollover(alias=name)
        with closing(rig.another_driver()) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
        assert numbers(client, name) == once(85)
        assert before < 85
        assert len(backing(client, name)) == 2


def roll_over(
    client: vendor.Elasticsearch, name: str, proxy: Proxy, step: int, counts: Callable[[Seen], bool] = lambda _: True
) -> threading.Event:
    """Let the stream roll over before the next request but ``step`` of those that count; the event says that it has."""
    rolled, turns = threading.Event(), iter(range(1000))

    def behave(seen: Seen) -> Answer | None:
        if not counts(seen) or next(turns) != step:
            return None
        if seen.is_bulk:
            proxy.forward(seen)
        client.indices.rollover(alias=name)
        rolled.set()
        return Answer(503) if seen.is_bulk else None

    proxy.behave = behave
    return rolled


def test_a_rollover_before_any_request_of_a_commit_leaves_each_row_once(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """A bulk request is carried out before the rollover instead, and the answer is lost, so that it is sent again."""
    name = options["index"]
    with (
        Proxy(options["hosts"], lambda _: None) as proxy,
        closing(joined(OneByOne(**{**options, "hosts": proxy.url}))) as rig,
    ):
        done, played = 0, 0
        for step in range(60):
            prepared = rig.prepare(step, [rows(done, done + 5)])
            done += 5
            rolled = roll_over(client, name, proxy, step)
            assert rig.commit(prepared).outcome is Outcome.COMMITTED
            proxy.behave = lambda _: None
            if not rolled.is_set():
                break
            played += 1
        assert numbers(client, name) == once(done)
        assert played >= 7
        assert len(backing(client, name)) == played + 1


def test_a_driver_that_was_overtaken_sends_nothing_after_a_rollover(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig, closing(rig.another_driver()) as other:
        prepared = rig.prepare(0, [rows(0, 5), rows(5, 10), rows(10, 15)])

        class Meanwhile(ListedRows):
            def read(self, task: str) -> Iterator[pa.RecordBatch]:
                for place, batch in enumerate(super().read(task)):
                    if place == 2:
                        assert other.commit(prepared).outcome is Outcome.COMMITTED
                        client.indices.rollover(alias=name)
                    yield batch

        slow = Meanwhile({task: list(prepared.rows.read(task)) for task in prepared.rows.tasks()})
        verdict = rig.committer.commit(prepared.epoch, prepared.part, slow)
        assert verdict.outcome is Outcome.COMMITTED
        assert numbers(client, name) == once(15)


def test_documents_of_another_attempt_are_not_taken_for_those_of_this_one(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """Once an operator has removed the claim of the other attempt, whose documents are there."""
    with closing(joined(OneByOne(**options))) as rig:
        broken = rig.prepare(0, [rows(0, 5), rows(5, 10), rows(10, 15)])
        with pytest.raises(InterruptedError):
            rig.committer.commit(broken.epoch, broken.part, BreaksOff(broken.rows, 2))
        assert set(numbers(client, options["index"])) < set(range(15))
        prepared = rig.prepare(0, [rows(20, 40)])
        with closing(rig.another_driver()) as other, pytest.raises(WentBack, match="is being applied"):
            other.commit(prepared)
        client.delete(index="epochsink-markers", id=claim_document(identity_key(rig.identity)))
        with closing(rig.another_driver()) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
        assert once(40) >= numbers(client, options["index"]) >= Counter(range(20, 40))


@pytest.mark.parametrize("when", ["vote", "commit", "start"])
def test_a_backing_index_of_the_newest_epoch_that_was_deleted_stops_until_it_is_accepted(
    options: dict[str, Any], client: vendor.Elasticsearch, when: str
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        done = LastDone(0, rig.apply(0, [rows(0, 5)]).epoch.attempt, ({},))
        prepared = rig.prepare(1, [rows(5, 10)], after=done)
        client.indices.rollover(alias=name)
        client.indices.delete(index=backing(client, name)[0])
        steps: dict[str, Callable[[], object]] = {
            "vote": lambda: rig.prepare(1, [rows(5, 10)], after=done),
            "commit": lambda: rig.commit(prepared, done),
            "start": lambda: rig.another_driver().committer.verify_applied(done, None),
        }
        with pytest.raises(WentBack, match="was deleted, created again or restored since epoch 0") as caught:
            steps[when]()
        assert "epochsink accept CHECKPOINT 0 --sink NAME" in caught.value.hint
        accepted = LastDone(0, "", ())
        assert rig.commit(prepared, accepted).outcome is Outcome.COMMITTED
        assert numbers(client, name) == Counter(range(5, 10))


def test_backing_indices_that_no_pending_or_newest_epoch_needs_may_go(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """As a stream's retention deletes them."""
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        rig.apply(0, [rows(0, 5)])
        client.indices.rollover(alias=name)
        rig.apply(1, [rows(5, 10)])
        client.indices.delete(index=backing(client, name)[0])
        rig.apply(2, [rows(10, 15)])
        assert numbers(client, name) == Counter(range(5, 15))


def test_a_pending_epoch_keeps_its_kind_of_target_and_rows_whatever_the_next_start_says(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        rig.apply(0, [rows(0, 5)])
        prepared = rig.prepare(1, [rows(5, 10)])
        with closing(Rig(Elasticsearch(**{**options, "index": "other"}, key="n"), rig.identity)) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
        assert numbers(client, name) == once(10)
        pending = rig.prepare(2, [rows(10, 15)])
        # an index in place of the stream, whose backing indices are closed to deletes only while it exists
        with (
            Proxy(options["hosts"], lambda seen: _as_an_index(seen, name)) as proxy,
            closing(Rig(OneByOne(**{**options, "hosts": proxy.url}), rig.identity)) as other,
            pytest.raises(WentBack, match="epoch 1 was applied to"),
        ):
            other.commit(pending)
        assert numbers(client, name) == once(10)


def _as_an_index(seen: Seen, name: str) -> Answer | None:
    if seen.method == "GET" and seen.path.startswith(f"/{name}"):
        settings = {"index.uuid": "another"}
        return Answer(200, json.dumps({name: {"aliases": {}, "settings": settings}}).encode())
    return None


def test_refused_documents_become_dead_letters_once_and_a_missing_pipeline_makes_none(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name, dead = options["index"], f"{options['index']}_dead"
    bad = keyless([{"n": "x", "@timestamp": AT}, {"n": 6}, {"n": 0, "@timestamp": AT}])
    with closing(joined(OneByOne(**options))) as rig:
        stopped = rig.prepare(0, [bad])
        with pytest.raises(RowsRejected, match="refuses 2 document"):
            rig.commit(stopped)
        lettered = OneByOne(**options, on_rejected="dead_letter", dead_letter_index=dead)
        with closing(Rig(lettered, rig.identity)) as other:
            assert other.committer.check(SCHEMA) == []
            client.indices.rollover(alias=name)
            assert other.commit(stopped).outcome is Outcome.COMMITTED
            assert len(other.stored(dead)) == 2
            last = other.prepare(1, [rows(1, 5)])
            client.indices.put_settings(index=name, settings={"index.default_pipeline": "missing-pipeline"})
            with pytest.raises(RowsRejected, match="refuses even an empty document"):
                other.commit(last)
            assert len(other.stored(dead)) == 2
            client.indices.put_settings(index=name, settings={"index.default_pipeline": None})
            assert other.commit(last).outcome is Outcome.COMMITTED
            letters = other.committer.participant.operator().letters("search")
            assert letters.retry(Chosen()).kept == 2
            assert letters.drop(Chosen()) == 2
        assert numbers(client, name) == once(5)


def strict(client: vendor.Elasticsearch, name: str, *, on: bool) -> None:
    """Let the newest backing index refuse documents with fields other than those of the template, or take them."""
    client.indices.put_mapping(index=name, dynamic="strict" if on else "true", write_index_only=True)


def lettered(rig: Rig, client: vendor.Elasticsearch, number: int, first: int, last: int) -> ElasticsearchLetters:
    """Apply an epoch whose rows are refused, but for the first one; return the letters, which the stream now takes."""
    strict(client, rig.sink.index, on=True)
    bad = [{"n": each, "@timestamp": AT, f"new{number}": 1} for each in range(first + 1, last)]
    rig.apply(number, [keyless([{"n": first, "@timestamp": AT}, *bad])])
    strict(client, rig.sink.index, on=False)
    found: ElasticsearchLetters = rig.committer.participant.operator().letters(rig.identity.sink)
    assert found.count(Chosen()) == len(bad)
    return found


@pytest.fixture
def with_letters(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "on_rejected": "dead_letter", "dead_letter_index": f"{options['index']}_dead"}


def test_a_rollover_before_any_request_of_a_retry_leaves_each_document_once(
    with_letters: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """A bulk request is carried out before the rollover instead, and the answer is lost, so that it is sent again."""
    name = with_letters["index"]
    with (
        Proxy(with_letters["hosts"], lambda _: None) as proxy,
        closing(joined(OneByOne(**{**with_letters, "hosts": proxy.url}))) as rig,
    ):
        done, played, oldest = 0, 0, backing(client, name)[0]
        for step in range(60):
            letters = lettered(rig, client, step, done, done + 4)
            done += 4
            # each backing index is asked for the documents, and there is one more at every step
            rolled = roll_over(
                client, name, proxy, step, counts=lambda seen: "/_mget" not in seen.path or oldest in seen.path
            )
            assert letters.retry(Chosen()) == Retried(written=3)
            proxy.behave = lambda _: None
            assert letters.count(Chosen()) == 0
            if not rolled.is_set():
                break
            played += 1
        assert numbers(client, name) == once(done)
        assert played >= 7


def test_a_retry_that_broke_off_before_a_rollover_appends_nothing_twice(
    with_letters: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """The first one appends the documents and cannot delete the letters; the second one is of a later epoch's start."""
    name = with_letters["index"]

    def keeps_letters(seen: Seen) -> Answer | None:
        return Answer(503) if seen.is_bulk and f"{name}_dead" in seen.path else None

    with (
        Proxy(with_letters["hosts"], keeps_letters) as proxy,
        closing(joined(OneByOne(**with_letters))) as rig,
        closing(Rig(OneByOne(**{**with_letters, "hosts": proxy.url, "timeout": 1.0}), rig.identity)) as cut_off,
    ):
        lettered(rig, client, 0, 0, 5)
        with pytest.raises(OutcomeUnknown, match="was broken off"):
            cut_off.committer.participant.operator().letters("search").retry(Chosen())
        assert numbers(client, name) == once(5)
        client.indices.rollover(alias=name)
        # the newest epoch's documents are in the new backing index alone
        rig.apply(1, [rows(5, 10)])
        with closing(rig.another_driver()) as other:
            assert other.committer.participant.operator().letters("search").retry(Chosen()) == Retried(written=4)
            assert other.committer.participant.operator().letters("search").count(Chosen()) == 0
        assert numbers(client, name) == once(10)


def test_a_retry_that_another_one_and_a_rollover_overtake_deletes_the_copies_that_it_makes(
    with_letters: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name = with_letters["index"]
    with closing(joined(OneByOne(**with_letters))) as rig:
        letters = lettered(rig, client, 0, 0, 5)
        overtaken: list[Retried] = []

        def overtakes(seen: Seen) -> Answer | None:
            if seen.is_bulk and not overtaken:
                overtaken.append(letters.retry(Chosen()))
                client.indices.rollover(alias=name)
            return None

        with (
            Proxy(with_letters["hosts"], overtakes) as proxy,
            closing(Rig(OneByOne(**{**with_letters, "hosts": proxy.url}), rig.identity)) as slow,
        ):
            assert slow.committer.participant.operator().letters("search").retry(Chosen()) == Retried(written=4)
        assert overtaken == [Retried(written=4)]
        assert numbers(client, name) == once(5)


CREATED: dict[str, Any] = {"result": "created", "status": 201}
EXISTS: dict[str, Any] = {"status": 409, "error": {"type": "version_conflict_engine_exception", "reason": "exists"}}


def appends(seen: Seen) -> bool:
    return seen.is_bulk and seen.body.startswith(b'{"create"')


def answered(seen: Seen, item: Callable[[str], dict[str, Any]]) -> Answer:
    """Answer a bulk request with an item for each ``_id``, of which only the fields that are asked for."""
    asked = re.findall(r"items\.\*\.(\w+)", unquote(seen.path))
    sent = [json.loads(line)["create"]["_id"] for line in seen.body.splitlines() if line.startswith(b'{"create"')]
    items = [{"create": {name: value for name, value in item(each).items() if name in asked}} for each in sent]
    errors = any("error" in each["create"] for each in items)
    return Answer(200, json.dumps({"errors": errors, "items": items}).encode())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"result": "noop", "status": 200}, "dropped documents, or sent them elsewhere"),
        ({**CREATED, "_index": "elsewhere"}, "stored in elsewhere"),
        ({**CREATED, "_index": ".fs-1", "failure_store": "used"}, "into its failure store"),
        ({**CREATED, "_id": "another"}, "stored under another _id"),
        ({**EXISTS, "_index": "elsewhere"}, "stored in elsewhere"),
        ({**EXISTS, "_id": "another"}, "stored under another _id"),
    ],
)
def test_an_answer_that_does_not_say_that_the_stream_holds_the_document_is_no_success(
    options: dict[str, Any], client: vendor.Elasticsearch, answer: dict[str, Any], reason: str
) -> None:
    """The development server runs neither processors nor failure stores, so a proxy answers as those do."""
    newest = backing(client, options["index"])[0]

    def elsewhere(seen: Seen) -> Answer | None:
        return answered(seen, lambda sent: {"_index": newest, "_id": sent, **answer}) if appends(seen) else None

    with closing(joined(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [rows(0, 5)])
        with (
            Proxy(options["hosts"], elsewhere) as proxy,
            closing(Rig(OneByOne(**{**options, "hosts": proxy.url}), rig.identity)) as other,
            pytest.raises(OutcomeUnknown, match=reason) as caught,
        ):
            other.commit(prepared)
        assert "stays pending in the ledger" in str(caught.value)
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert numbers(client, options["index"]) == once(5)


class SendsElsewhere:
    """Answers as a server whose pipeline sends each document to another index; the first ``lost`` answers are lost."""

    def __init__(self, lost: int = 0) -> None:
        self._lost = lost
        self._there: set[str] = set()

    def __call__(self, seen: Seen) -> Answer | None:
        if not appends(seen):
            return None
        answer = answered(seen, self._item)
        self._lost -= 1
        return Answer(503) if self._lost >= 0 else answer

    def _item(self, document_id: str) -> dict[str, Any]:
        result = EXISTS if document_id in self._there else CREATED
        self._there.add(document_id)
        return {"_index": "elsewhere", "_id": document_id, **result}


@pytest.mark.parametrize("lost", [0, 1], ids=["told", "lost"])
def test_documents_that_a_pipeline_sends_elsewhere_do_not_count_as_stored_when_they_are_sent_again(
    options: dict[str, Any], client: vendor.Elasticsearch, lost: int
) -> None:
    """They exist already, but not in the stream; also if the answer that says that they were created is lost."""
    with closing(joined(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [rows(0, 5)])
        with (
            Proxy(options["hosts"], SendsElsewhere(lost)) as proxy,
            closing(Rig(OneByOne(**{**options, "hosts": proxy.url}), rig.identity)) as other,
        ):
            for _ in range(2):
                with pytest.raises(OutcomeUnknown, match="stored in elsewhere"):
                    other.commit(prepared)
        assert rig.committer.newest() is None
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert numbers(client, options["index"]) == once(5)


def test_a_retry_whose_documents_a_pipeline_sends_elsewhere_keeps_the_letters(
    with_letters: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """Also when it is typed again, and the documents exist already, but not in the stream."""
    with closing(joined(OneByOne(**with_letters))) as rig:
        letters = lettered(rig, client, 0, 0, 5)
        with (
            Proxy(with_letters["hosts"], SendsElsewhere()) as proxy,
            closing(Rig(OneByOne(**{**with_letters, "hosts": proxy.url}), rig.identity)) as other,
        ):
            for _ in range(2):
                with pytest.raises(PrepareFailed, match="stored in elsewhere"):
                    other.committer.participant.operator().letters("search").retry(Chosen())
        assert letters.count(Chosen()) == 4
        assert letters.retry(Chosen()) == Retried(written=4)
        assert numbers(client, with_letters["index"]) == once(5)


def test_letters_of_a_run_before_a_rollover_do_not_count(
    with_letters: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    """The old backing index refuses all rows. The new one, to which they are sent again, refuses one."""
    name = with_letters["index"]
    with (
        Proxy(with_letters["hosts"], lambda _: None) as proxy,
        closing(joined(OneByOne(**{**with_letters, "hosts": proxy.url}))) as rig,
    ):
        strict(client, name, on=True)

        def rolls_over(seen: Seen) -> Answer | None:
            if not (seen.is_bulk and f"{name}_dead" in seen.path):
                return None
            proxy.behave = lambda _: None
            answer = proxy.forward(seen)
            client.indices.rollover(alias=name)
            return answer

        proxy.behave = rolls_over
        documents = [{"n": number, "@timestamp": AT, "new": 1} for number in range(4)]
        prepared = rig.prepare(0, [keyless([*documents, {"n": "x", "@timestamp": AT}])])
        verdict = rig.commit(prepared)
        assert (verdict.outcome, verdict.set_aside) == (Outcome.COMMITTED, 1)
        letters = rig.committer.participant.operator().letters(rig.identity.sink)
        assert letters.count(Chosen()) == 1
        client.indices.refresh(index=f"{name}_dead")
        assert client.count(index=f"{name}_dead")["count"] == 1, "those of the first run are gone, not only void"
        rig.apply(1, [rows(4, 8)])
        assert letters.count(Chosen()) == 1
        assert [letter.row["document"]["n"] for letter in letters.read(Chosen(), 9)] == ["x"]
        assert numbers(client, name) == once(8)
        assert len(backing(client, name)) == 2


def test_a_backing_index_of_a_rollover_that_takes_none_of_the_rows_is_refused_before_the_decision(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        rig.committer.participant.begin(Epoch(0, "a"), {"search": SCHEMA})
        rig.apply(0, [rows(0, 5)])
        template = {
            "settings": {"number_of_replicas": 0},
            "mappings": {"properties": {"n": {"type": "ip"}, "@timestamp": {"type": "date"}}},
        }
        client.indices.put_index_template(name=name, index_patterns=[name], data_stream={}, template=template)
        client.indices.rollover(alias=name)
        with pytest.raises(PrepareFailed, match=r"does not take the rows: column 'n' is int64.* epoch 1 is not record"):
            rig.prepare(1, [rows(5, 9)])
        template["mappings"]["properties"]["n"]["type"] = "long"  # type: ignore[index]
        client.indices.put_index_template(name=name, index_patterns=[name], data_stream={}, template=template)
        client.indices.rollover(alias=name)
        rig.apply(1, [rows(5, 9)])
        assert numbers(client, name) == once(9)


def test_a_backing_index_that_forgets_stops_vote_and_commit(
    options: dict[str, Any], client: vendor.Elasticsearch
) -> None:
    name = options["index"]
    with closing(joined(OneByOne(**options))) as rig:
        prepared = rig.prepare(0, [rows(0, 5)])
        client.indices.put_settings(index=name, settings={"index.translog.durability": "async"})
        with pytest.raises(OutcomeUnknown, match="durability=async"):
            rig.commit(prepared)
        with pytest.raises(PrepareFailed, match="durability=async"):
            rig.prepare(0, [rows(0, 5)])
        client.indices.put_settings(index=name, settings={"index.translog.durability": None})
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert numbers(client, name) == once(5)


def test_check_names_what_a_stream_cannot_take(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    def findings(schema: pa.Schema = SCHEMA, **more: Any) -> list[str]:
        with closing(OneSink.of(Elasticsearch(**{**options, **more}))) as committer:
            return committer.check(schema)

    assert findings() == []
    (finding,) = findings(pa.schema([("n", pa.int64())]))
    assert "needs the field '@timestamp'" in finding
    (finding,) = findings(key="n")
    assert "takes no second row of a key" in finding
    client.indices.put_settings(index=options["index"], settings={"index.blocks.write": True})
    (finding,) = findings()
    assert "accepts no writes" in finding


def test_a_keyed_row_is_never_appended(options: dict[str, Any], client: vendor.Elasticsearch) -> None:
    with closing(Rig(OneByOne(**options, key="n"), joined(OneByOne(**options)).identity)) as rig:
        with pytest.raises(PrepareFailed, match="takes no second row of a key"):
            rig.prepare(0, [rendered([("a", {"n": 1, "@timestamp": AT})])])
        assert rig.committer.newest() is None
        assert numbers(client, options["index"]) == Counter()
