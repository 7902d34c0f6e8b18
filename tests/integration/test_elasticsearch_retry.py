"""A retry of dead letters writes each document once, and never over a newer one, whatever is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_rig import Rig, keyless, rendered

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.errors import RowsRejected, WentBack
from epochsink.sink import Chosen, Outcome, Retried

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch as vendor
    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink.devkit.services import ElasticsearchService
    from epochsink.elasticsearch.letters import ElasticsearchLetters
    from epochsink.sink import Letter

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
    found: ElasticsearchLetters = rig.committer.participant.letters(rig.identity.sink)
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


def test_a_newer_document_is_never_replaced(rig: Rig, client: vendor.Elasticsearch) -> None:
    """Nor is one that a later epoch deleted brought back, while the index remembers that."""
    rig.apply(0, [rendered([("a", {"new": 1}), ("b", {"new": 2}), ("c", {"new": 3})])])
    rig.apply(1, [rendered([("a", {"n": 1}), ("b", None)])])
    correct(client, rig)
    assert letters_of(rig).retry(ALL) == Retried(written=1, superseded=2)
    assert rig.stored() == {"a": {"n": 1}, "c": {"new": 3}}
    assert read(rig) == []
    assert "later epoch" in letters_of(rig).caution()


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
        rig.committer.keeping(rig.prepare(0, [batch.append_column("index", pa.array([index] * 2))]).epoch, SCHEMA)
        rig.apply(0, [batch.append_column("index", indices)])
        assert letters_of(rig).count(ALL) == 2
        client.indices.put_mapping(index=index, properties={"new": {"type": "long"}})
        done = letters_of(rig).retry(ALL)
        assert (done.written, done.kept) == (1, 1)
        assert list(rig.stored(index).values()) == [{"new": 1}]


def test_an_index_that_was_made_anew_gets_no_letters(rig: Rig, client: vendor.Elasticsearch) -> None:
    rig.apply(0, [rendered([("a", {"new": 1})])])
    client.indices.delete(index=rig.sink.index)
    client.indices.create(index=rig.sink.index)
    with pytest.raises(WentBack, match="is not the one that epoch 0 was applied to"):
        letters_of(rig).retry(ALL)
    assert letters_of(rig).count(ALL) == 1


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
            assert [letter.pending for letter in later.committer.participant.letters("x").read(ALL, 100)] == [False] * 5
        assert letters_of(rig).count(Chosen(epoch=1)) == 3
        prepared = rig.prepare(2, [rendered([("d", {"new": 1})])])
        with pytest.raises(RowsRejected, match="letters_limit"):
            rig.commit(prepared)
        correct(client, rig)
        assert rig.commit(prepared).set_aside == 0
        assert letters_of(rig).read(Chosen(epoch=2), 9) == []
