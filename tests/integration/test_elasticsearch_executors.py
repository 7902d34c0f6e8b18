"""Large epochs are applied by executors: with all the rules of the driver, and late or twice without harm."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from elasticsearch_requests import SmallRequests
from elasticsearch_rig import Elsewhere, Rig, crossed, keyless, rendered
from http_proxy import Answer, Proxy, Seen

from epochsink.elasticsearch import applied_epochs, apply_on_executors, deduplicate
from epochsink.elasticsearch.apply_on_executors import Part, PartJob
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.errors import GaveUp, UnfitIndex
from epochsink.errors import OutcomeUnknown, RowsRejected, SpoolDamaged
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from elasticsearch_rig import Prepared
    from fix_services import FreshName

    from epochsink.devkit.services import ElasticsearchService


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Arguments of a sink with an id, all of whose epochs of two tasks are large."""
    return {
        "hosts": elasticsearch.url,
        "index": fresh_index(),
        "key": "id",
        "order_by": "n",
        "create": {"number_of_shards": 2, "number_of_replicas": 0},
        "timeout": 20.0,
        "executors_above": 0,
    }


@pytest.fixture
def rig(options: dict[str, Any]) -> Iterator[Rig]:
    made = Rig.joining(SmallRequests(**options))
    made.committer.participant.executors = Elsewhere()
    yield made
    made.close()


def numbered(first: int, last: int, value: int = 0) -> pa.RecordBatch:
    ids = range(first, last)
    return rendered([(f"d{number}", {"n": value}) for number in ids], [value for _ in ids])


def jobs(rig: Rig) -> list[str]:
    assert isinstance(rig.committer.participant.executors, Elsewhere)
    return rig.committer.participant.executors.jobs


def job_of(rig: Rig, prepared: Prepared) -> PartJob:
    """Return the job as a part of it reached an executor that was cut off then."""
    return PartJob(rig.sink, rig.identity, prepared.epoch, prepared.rows, index=rig.sink.index)


def test_a_large_epoch_is_verified_and_applied_by_executors(rig: Rig) -> None:
    rig.apply(0, [numbered(0, 60), numbered(60, 70)], [numbered(70, 100)])
    assert jobs(rig) == ["look", "post"]
    assert rig.stored() == {f"d{number}": {"n": 0} for number in range(100)}


def test_a_small_epoch_and_one_task_alone_are_the_drivers(rig: Rig, options: dict[str, Any]) -> None:
    rig.apply(0, [numbered(0, 50)])
    small = Rig(SmallRequests(**{**options, "executors_above": 100}), rig.identity)
    small.committer.participant.executors = Elsewhere()
    with closing(small):
        small.apply(1, [numbered(0, 50, 1)], [numbered(50, 100, 1)])
        assert jobs(small) == jobs(rig) == []
    never = Rig(SmallRequests(**{**options, "executors_above": None}), rig.identity)
    never.committer.participant.executors = Elsewhere()
    with closing(never):
        never.apply(2, [numbered(0, 50, 2)], [numbered(50, 100, 2)])
        assert jobs(never) == []
    assert rig.stored() == {f"d{number}": {"n": 2} for number in range(100)}


def test_the_last_row_of_an_id_wins_in_whatever_task_it_is(rig: Rig) -> None:
    rig.apply(0, [numbered(0, 30, 5), numbered(0, 10, 7)], [numbered(20, 40, 6)], [numbered(0, 5, 1)])
    values = [7] * 10 + [5] * 10 + [6] * 20
    assert rig.stored() == {f"d{number}": {"n": value} for number, value in enumerate(values)}


@pytest.mark.parametrize("above", [0, None], ids=["executors", "driver"])
def test_where_spark_brings_keys_together_each_task_finds_its_last_rows_and_the_driver_reads_no_ids(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, above: int | None
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the driver has read the ids of all tasks")

    monkeypatch.setattr(deduplicate, "count", read)
    rig = Rig.joining(SmallRequests(**{**options, "partition_by_key": True, "executors_above": above}))
    rig.committer.participant.executors = Elsewhere()
    with closing(rig):
        rig.apply(0, [numbered(0, 30, 5), numbered(0, 10, 7), numbered(5, 20, 6)], [numbered(30, 60, 1)])
        values = [7] * 10 + [6] * 10 + [5] * 10 + [1] * 30
        assert rig.stored() == {f"d{number}": {"n": value} for number, value in enumerate(values)}
        assert jobs(rig) == (["look", "post"] if above == 0 else [])


def test_an_executor_sees_that_a_pipeline_takes_documents_elsewhere(options: dict[str, Any]) -> None:
    """The index has an empty pipeline; what stands for one that drops answers each request."""
    rig = Rig.joining(SmallRequests(**options))
    with closing(rig), closing(connect(rig.sink)) as client:
        client.ingest.put_pipeline(id="epochsink-test-empty", processors=[])
        client.indices.put_settings(index=rig.sink.index, settings={"index.final_pipeline": "epochsink-test-empty"})
        prepared = rig.prepare(0, [numbered(0, 50)], [numbered(50, 100)])
        dropped = {"_index": rig.sink.index, "_version": -3, "result": "noop", "status": 200}

        def drop(seen: Seen) -> Answer | None:
            items = [{"index": {"_id": name, **dropped}} for name in seen.ids] if "items" in seen.path else []
            return Answer(200, json.dumps({"errors": False, "items": items}).encode()) if seen.is_bulk else None

        with Proxy(options["hosts"], drop) as proxy:
            losing = Rig(SmallRequests(**{**options, "hosts": proxy.url}), rig.identity)
            losing.committer.participant.executors = Elsewhere()
            with closing(losing), pytest.raises(OutcomeUnknown, match=r"has dropped \d+ of"):
                losing.commit(prepared)
            assert jobs(losing) == ["look", "post"]
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert len(rig.stored()) == 100


def test_rows_without_a_key_get_the_ids_that_the_driver_gives_them(options: dict[str, Any]) -> None:
    """So that a run of executors and one of the driver, at one epoch, make no document twice."""
    plain = {name: value for name, value in options.items() if name not in ("key", "order_by")}
    rig = Rig.joining(SmallRequests(**plain))
    with closing(rig):
        prepared = rig.prepare(0, [keyless([{"n": n} for n in range(50)])], [keyless([{"n": n} for n in range(9)])])
        for part in (Part(0, prepared.rows.tasks()[0]), Part(1, prepared.rows.tasks()[1])):
            assert job_of(rig, prepared).post(part).problem is None
        assert len(rig.stored()) == 59
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        assert len(rig.stored()) == 59


@pytest.mark.parametrize("away", [1, 2])
def test_where_executors_fail_the_driver_applies_the_epoch(rig: Rig, away: int) -> None:
    """Whether they were to verify it or had applied all of it."""
    rig.committer.participant.executors = Elsewhere(away)
    rig.apply(0, [numbered(0, 50)], [numbered(50, 100)])
    assert len(jobs(rig)) == 1 if away == 1 else 2
    assert len(rig.stored()) == 100


def test_a_part_that_arrives_after_later_epochs_sends_nothing(rig: Rig) -> None:
    late = rig.apply(0, [numbered(0, 50)], [numbered(50, 100)])
    rig.apply(1, [numbered(0, 50, 1)], [numbered(50, 100, 1)])
    answer = job_of(rig, late).post(Part(0, late.rows.tasks()[0]))
    assert isinstance(answer.problem, applied_epochs.Overtaken)


def test_a_part_that_goes_on_after_later_epochs_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that was cut off when it had looked: only the versions are left to refuse what it sends."""
    late = rig.apply(0, [numbered(0, 50)], [numbered(50, 100)])
    rig.apply(1, [numbered(0, 50, 1)], [numbered(50, 100, 1)])
    monkeypatch.setattr(applied_epochs.Lookout, "now", lambda _: None)
    answer = job_of(rig, late).post(Part(0, late.rows.tasks()[0]))
    assert answer.problem is None
    assert len(answer.refused) == 50
    assert all(refusal.conflict for refusal in answer.refused)
    assert rig.stored() == {f"d{number}": {"n": 1} for number in range(100)}


def test_documents_changed_elsewhere_are_written_over_by_the_driver(rig: Rig) -> None:
    rig.apply(0, [numbered(0, 10)], [numbered(10, 20)])
    with closing(connect(rig.sink)) as client:
        for _ in range(3):
            client.update(index=rig.sink.index, id="d3", doc={"n": 99})
    rig.apply(1, [numbered(0, 10, 1)], [numbered(10, 20, 1)])
    assert rig.stored() == {f"d{number}": {"n": 1} for number in range(20)}


@pytest.mark.parametrize("most", [1_000, 3])
def test_refused_documents_become_dead_letters_each_once(
    options: dict[str, Any], fresh_index: FreshName, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where a part has more of them than it may hand to the driver."""
    monkeypatch.setattr(apply_on_executors, "MOST_REFUSED", most)
    letters = fresh_index()
    rig = Rig.joining(SmallRequests(**options, on_rejected="dead_letter", dead_letter_index=letters))
    rig.committer.participant.executors = Elsewhere()
    with closing(rig):
        bad = rendered([(f"bad{number}", {"n": "no number"}) for number in range(8)], [0] * 8)
        rig.apply(0, [numbered(0, 50), bad], [numbered(50, 100)])
        assert len(rig.stored()) == 100
        kept = rig.stored(letters).values()
        assert sorted(letter["id"] for letter in kept) == [f"bad{number}" for number in range(8)]


def test_a_refused_document_stops_the_query_and_is_named(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered([("bad", {"n": "no number"})], [0])], [numbered(0, 10)])
    with pytest.raises(RowsRejected, match="'bad'"):
        rig.commit(prepared)
    assert rig.committer.newest() is None


def test_a_damaged_file_is_found_before_anything_is_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = rig.prepare(0, [numbered(0, 10)], [numbered(10, 20)])
    second = prepared.rows.tasks()[1]
    intact = type(prepared.rows).read

    def read(rows: Any, task: str) -> Any:
        if task == second:
            raise SpoolDamaged("the spool file was cut")
        return intact(rows, task)

    monkeypatch.setattr(type(prepared.rows), "read", read)
    with pytest.raises(SpoolDamaged):
        rig.commit(prepared)
    assert rig.stored() == {}


def test_rows_that_are_missing_are_found_before_anything_is_sent(rig: Rig) -> None:
    prepared = rig.prepare(0, [numbered(0, 10)], [numbered(10, 20)])
    prepared.part["rows"] += 1
    with pytest.raises(OutcomeUnknown, match="holds 20 rows, but the ledger records 21"):
        rig.commit(prepared)
    assert rig.stored() == {}


@pytest.mark.parametrize(("status", "problem"), [(503, GaveUp), (401, UnfitIndex)])
def test_what_an_executor_meets_is_told_to_the_driver(
    rig: Rig, options: dict[str, Any], status: int, problem: type[Exception]
) -> None:
    prepared = rig.prepare(0, [numbered(0, 10)], [numbered(10, 20)])
    body = b'{"error":{"type":"x","reason":"y"}}'
    with Proxy(None, lambda _: Answer(status, body)) as proxy:
        sink = SmallRequests(**{**options, "hosts": proxy.url, "timeout": 0.5})
        job = PartJob(sink, rig.identity, prepared.epoch, prepared.rows, index=sink.index)
        answer = job.post(Part(0, prepared.rows.tasks()[0]))
    assert isinstance(crossed(answer).problem, problem)
