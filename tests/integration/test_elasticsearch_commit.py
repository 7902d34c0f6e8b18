"""Applying epochs to a real server: once, twice, half, late, out of order, and through a bad network."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import elasticsearch_rig
import pytest
from elasticsearch_requests import OneByOne, SmallRequests
from elasticsearch_rig import Rig, keyless, rendered
from http_proxy import Answer, Lost, Proxy, Seen, refuse_some

from epochsink import failpoints
from epochsink.elasticsearch import Elasticsearch, applied_epochs
from epochsink.elasticsearch.committable import WrittenTask
from epochsink.elasticsearch.connection import connect
from epochsink.errors import Fenced, OutcomeUnknown, PrepareFailed, RowsRejected, SpoolDamaged, SpoolMissing, WentBack
from epochsink.identity import claim_document, marker_document
from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, LastDone, Outcome, Task, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticsearch_rig import Document, Prepared
    from fix_services import FreshName

    from epochsink.sink import SpoolFile
    from epochsink_devkit.services import ElasticsearchService


@pytest.fixture
def options(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> dict[str, Any]:
    """Arguments of a sink with an id on an index of its own; small requests, so that each epoch has many."""
    settings = {"number_of_shards": 2, "number_of_replicas": 0}
    return {
        "hosts": elasticsearch.url,
        "index": fresh_index(),
        "key": "id",
        "delete_when": "gone",
        "create": settings,
        "timeout": 20.0,
    }


@pytest.fixture
def rig(options: dict[str, Any]) -> Iterator[Rig]:
    made = Rig.joining(SmallRequests(**options))
    yield made
    made.close()


def numbered(first: int, last: int, **more: Any) -> list[Document]:
    return [(f"d{number}", {"n": number, **more}) for number in range(first, last)]


def behind(rig: Rig, proxy: Proxy, kind: type[Elasticsearch] = SmallRequests, **changed: Any) -> Rig:
    """Return the same sink, reaching the server through a proxy."""
    sink = kind(proxy.url, index=rig.sink.index, key="id", delete_when="gone", **{"timeout": 20, **changed})
    return Rig(sink, rig.identity)


def test_an_epoch_is_invisible_before_and_whole_after_its_commit(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 50))], [rendered(numbered(50, 100)), rendered(numbered(100, 120))])
    assert rig.stored() == {}
    assert rig.committer.newest() is None
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 120))
    assert rig.committer.newest() == 0


def test_applying_again_changes_nothing(rig: Rig) -> None:
    prepared = rig.apply(0, [rendered(numbered(0, 60))])
    versions = _versions(rig)
    with closing(rig.another_driver()) as other:
        assert other.commit(prepared).outcome is Outcome.COMMITTED
    assert _versions(rig) == versions


def test_applying_again_without_the_marker_changes_nothing_either(rig: Rig) -> None:
    prepared = rig.apply(0, [rendered(numbered(0, 60))])
    versions = _versions(rig)
    _forget_marker(rig)
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert _versions(rig) == versions
    assert rig.committer.newest() == 0


def test_versions_are_base_plus_epoch(rig: Rig) -> None:
    rig.apply(0, [rendered(numbered(0, 3))])
    rig.apply(7, [rendered(numbered(1, 2))])
    base = rig.identity.origin["base"]
    assert _versions(rig) == {"d0": base, "d1": base + 7, "d2": base}


@pytest.mark.essential
@pytest.mark.parametrize(
    "point", ["elasticsearch.bulk.between:1", "elasticsearch.bulk.between:5", "elasticsearch.marker.before"]
)
def test_another_process_finishes_what_a_killed_one_began(
    rig: Rig, options: dict[str, Any], tmp_path: Path, point: str
) -> None:
    rig.apply(0, [rendered(numbered(0, 10, state="old"))])
    changes: list[Document] = [*numbered(0, 91, state="new"), ("d3", None)]
    prepared, order, _ = _spooled(rig, options, tmp_path, 1, changes)
    killed = _apply_in_a_process(order, point)
    assert killed.returncode == -signal.SIGKILL
    changed = sum(document.get("state") == "new" for document in rig.stored().values())
    assert 0 < changed < 90 if "between" in point else changed == 90
    assert rig.committer.newest() == 0
    finished = _apply_in_a_process(order, None)
    assert finished.stdout.strip() == "committed", finished.stderr
    assert rig.stored() == {name: document for name, document in dict(changes).items() if document is not None}
    assert rig.committer.newest() == prepared.number


def test_a_stale_epoch_changes_nothing_and_is_unknown(rig: Rig) -> None:
    """The driver then finds out whether a successor of its own has gone on, or a driver on another copy."""
    stale = rig.prepare(0, [rendered(numbered(0, 5, state="old"))])
    rig.apply(1, [rendered(numbered(0, 5, state="new"))])
    versions = _versions(rig)
    assert rig.commit(stale).outcome is Outcome.UNKNOWN
    assert _versions(rig) == versions
    assert {each["state"] for each in rig.stored().values()} == {"new"}


def test_a_driver_overtaken_in_the_middle_leaves_what_is_newer(rig: Rig) -> None:
    """Driver A has applied one request; driver B applies this epoch and the next; A goes on."""
    first = rig.prepare(0, [rendered(numbered(0, 40, state="old"))])
    second = _ahead(rig, 1, numbered(0, 40, state="new"))
    overtaken = False

    def behave(seen: Seen) -> None:
        nonlocal overtaken
        if seen.is_bulk and not overtaken and len(proxy.bulks) > 1:
            overtaken = True
            with closing(rig.another_driver()) as other:
                assert other.commit(first).outcome is Outcome.COMMITTED
                assert other.commit(second).outcome is Outcome.COMMITTED

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, proxy, OneByOne)) as slow:
        assert slow.commit(first).outcome is Outcome.UNKNOWN
    assert overtaken
    assert {each["state"] for each in rig.stored().values()} == {"new"}
    assert rig.committer.newest() == 1


def test_a_driver_that_slept_long_looks_before_it_goes_on_writing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its stale documents would come back once the versions of the deleted ones are forgotten."""
    first = rig.prepare(0, [rendered(numbered(0, 40))])
    second = _ahead(rig, 1, [(name, None) for name, _ in numbered(0, 40)])
    slept: list[int] = []

    def sleep(point: str) -> None:
        if point == "elasticsearch.bulk.between" and not slept:
            slept.append(len(proxy.bulks))
            with closing(rig.another_driver()) as other:
                monkeypatch.undo()
                assert other.commit(first).outcome is Outcome.COMMITTED
                assert other.commit(second).outcome is Outcome.COMMITTED
            monkeypatch.setattr(applied_epochs, "LOOK_EVERY", 0.0)

    with Proxy(rig.sink.hosts[0], lambda _: None) as proxy, closing(behind(rig, proxy, OneByOne)) as slow:
        monkeypatch.setattr(failpoints, "reach", sleep)
        assert slow.commit(first).outcome is Outcome.UNKNOWN
    assert slept
    assert len(proxy.bulks) <= slept[0] + 2
    assert rig.stored() == {}


def test_a_server_that_is_away_for_a_moment_does_not_end_the_commit(rig: Rig) -> None:
    """Not only bulk requests: each of the first requests finds nobody."""
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], lambda _: Answer(503) if len(proxy.seen) < 10 else None) as proxy,
        closing(behind(rig, proxy)) as slow,
    ):
        assert slow.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 20))


def test_deleted_documents_stay_deleted_when_their_epoch_is_replayed(rig: Rig) -> None:
    written = rig.apply(0, [rendered(numbered(0, 5))])
    deleted = rig.apply(1, [rendered([("d1", None), ("d2", None), ("never", None)])])
    assert rig.commit(written).outcome is Outcome.UNKNOWN
    _forget_marker(rig)
    assert rig.commit(deleted).outcome is Outcome.COMMITTED
    assert set(rig.stored()) == {"d0", "d3", "d4"}


def _change_elsewhere(rig: Rig, document_id: str, *, times: int = 3, delete: bool = False) -> None:
    """Change a document as another program would: its version then lies above the next epoch's."""
    with closing(connect(rig.sink)) as client:
        for time in range(times):
            client.update(index=rig.sink.index, id=document_id, doc={"elsewhere": time})
        if delete:
            client.delete(index=rig.sink.index, id=document_id)


def test_documents_changed_elsewhere_between_epochs_get_the_rows_of_the_next(rig: Rig) -> None:
    rig.apply(0, [rendered(numbered(0, 6))])
    for document_id in ("d0", "d1", "d4"):
        _change_elsewhere(rig, document_id)
    _change_elsewhere(rig, "d2", delete=True)
    rig.apply(1, [rendered([("d0", {"n": 9}), ("d1", None), ("d2", {"n": 9}), ("d3", {"n": 9})])])
    expected = {"d0": {"n": 9}, "d2": {"n": 9}, "d3": {"n": 9}, "d4": {"n": 4, "elsewhere": 2}, "d5": {"n": 5}}
    assert rig.stored() == expected
    rig.apply(2, [rendered([("d0", {"n": 10}), ("d1", {"n": 10}), ("d2", None)])])
    del expected["d2"]
    assert rig.stored() == {**expected, "d0": {"n": 10}, "d1": {"n": 10}}


def test_a_slow_driver_that_writes_over_a_changed_document_does_not_undo_a_later_epoch(rig: Rig) -> None:
    """It has looked at the document and at the marker; three epochs are applied before its request arrives.

    The last of them has the very version with which the slow driver would write.
    """
    rig.apply(0, [rendered(numbered(0, 1))])
    _change_elsewhere(rig, "d0", times=2)
    first = rig.prepare(1, [rendered([("d0", {"n": 1})])])
    later = [_ahead(rig, 2, [("d9", {"n": 9})]), _ahead(rig, 3, [("d0", {"n": 3})])]
    overtaken = False

    def behave(seen: Seen) -> None:
        nonlocal overtaken
        if seen.is_bulk and b'"external"' in seen.body and not overtaken:
            overtaken = True
            with closing(rig.another_driver()) as other:
                for each in (first, *later):
                    assert other.commit(each).outcome is Outcome.COMMITTED

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, proxy)) as slow:
        assert slow.commit(first).outcome is Outcome.UNKNOWN
    assert overtaken
    assert rig.stored() == {"d0": {"n": 3}, "d9": {"n": 9}}


def test_a_driver_that_was_superseded_does_not_write_over_its_successors_document_after_a_restore(rig: Rig) -> None:
    """The restored index of markers shows no later epoch than its own, but the ledger shows the successor."""
    first = rig.prepare(0, [rendered([("d0", {"n": 0})])])
    with closing(rig.another_driver()) as successor:
        assert successor.commit(first).outcome is Outcome.COMMITTED
        successor.apply(1, [rendered([("d0", {"n": 1})])])
    key = identity_key(rig.identity)
    with closing(connect(rig.sink)) as client:
        for document in (marker_document(key), claim_document(key)):
            client.delete(index=applied_epochs.INDEX, id=document)

    def stop() -> NoReturn:
        raise Fenced("another driver has taken over this checkpoint")

    rig.committer.participant.require_ours = stop
    with pytest.raises(Fenced):
        rig.commit(first)
    assert rig.stored() == {"d0": {"n": 1}}


def test_a_deleted_document_can_come_back_in_a_later_epoch(rig: Rig) -> None:
    rig.apply(0, [rendered(numbered(0, 2))])
    rig.apply(1, [rendered([("d0", None)])])
    rig.apply(2, [rendered([("d0", {"n": 9})])])
    assert rig.stored() == {"d0": {"n": 9}, "d1": {"n": 1}}


def test_a_new_checkpoint_loses_no_update_to_an_old_index(rig: Rig) -> None:
    rig.apply(5000, [rendered(numbered(0, 5, state="old"))])
    with closing(Rig.joining(rig.sink)) as new:
        assert new.committer.newest() is None
        new.apply(0, [rendered(numbered(0, 5, state="new"))])
        assert {each["state"] for each in new.stored().values()} == {"new"}


@pytest.mark.parametrize("version", [1, 1_795_000_000, 1_795_000_000_000, 1_795_000_000_000_000_000])
def test_the_base_lies_above_counters_and_timestamps_used_as_versions(rig: Rig, version: int) -> None:
    with closing(connect(rig.sink)) as client:
        client.index(index=rig.sink.index, id="d0", document={"n": -1}, version=version, version_type="external")
    rig.apply(0, [rendered(numbered(0, 1))])
    assert rig.stored() == {"d0": {"n": 0}}


def test_bases_differ_even_within_one_second(rig: Rig) -> None:
    bases = [rig.committer.join().origin["base"] for _ in range(4)]
    assert len({*bases, rig.identity.origin["base"]}) == 5
    assert bases == sorted(bases)


def test_a_newer_version_of_somebody_else_stops_and_names_the_document(rig: Rig) -> None:
    with closing(Rig.joining(rig.sink)) as other:
        other.apply(0, [rendered([("d1", {"n": 100}), ("d2", {"n": 101})])])
        other.apply(1, [rendered([("d2", None)])])
    for number, refused in enumerate(("d1", "d2")):
        documents = [each for each in numbered(0, 5) if each[0] not in {"d1", "d2"} - {refused}]
        prepared = rig.prepare(number, [rendered(documents)])
        # an operator has discarded the first one
        discarded = LastDone(number - 1, "", ()) if number else None
        with pytest.raises(RowsRejected, match="which this sink did not write") as caught:
            rig.commit(prepared, discarded)
        assert caught.value.facts["ids"] == [refused]
    assert rig.committer.newest() is None
    assert rig.stored()["d1"] == {"n": 100}
    assert "d2" not in rig.stored()


def test_rows_without_a_key_are_not_duplicated_by_replays(options: dict[str, Any]) -> None:
    del options["key"], options["delete_when"]
    with closing(Rig.joining(SmallRequests(**options))) as rig:
        batches = [[keyless([{"n": 10 * task + row} for row in range(10)])] for task in range(3)]
        prepared = rig.apply(0, *batches)
        _forget_marker(rig)
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        rig.apply(1, *batches)
        found = [each["n"] for each in rig.stored().values()]
        assert sorted(found) == sorted([*range(10), *range(10, 20), *range(20, 30)] * 2)
        with closing(Rig.joining(rig.sink)) as new_checkpoint:
            new_checkpoint.apply(0, *batches)
            assert len(new_checkpoint.stored()) == 90


def test_a_document_that_cannot_be_read_is_not_taken_for_an_absent_one(options: dict[str, Any]) -> None:
    """Its shard is not served for a moment: what somebody has changed in it since it was appended stays."""
    del options["key"], options["delete_when"]
    asked: list[Answer] = []

    def behave(seen: Seen) -> Answer | None:
        if "_mget" not in seen.path:
            return None
        answer = proxy.forward(seen)
        asked.append(answer)
        if len(asked) > 2:
            return answer
        error = {"type": "no_shard_available_action_exception", "reason": "No shard available"}
        found = json.loads(answer.body)["docs"]
        docs = [{"_index": each["_index"], "_id": each["_id"], "error": error} for each in found]
        return Answer(200, json.dumps({"docs": docs}).encode())

    with closing(Rig.joining(SmallRequests(**options))) as rig:
        prepared = rig.apply(0, [keyless([{"n": number} for number in range(10)])])
        _forget_marker(rig)
        with closing(connect(rig.sink)) as client:
            for touch in range(2):
                client.update(index=rig.sink.index, id=next(iter(rig.stored())), doc={"touched": touch})
        before = rig.stored()
        with Proxy(options["hosts"], behave) as proxy:
            through = SmallRequests(**{**options, "hosts": proxy.url})
            with closing(Rig(through, rig.identity)) as again:
                assert again.commit(prepared).outcome is Outcome.COMMITTED
        assert len(asked) > 2
        assert rig.stored() == before


def test_the_last_row_of_an_id_in_an_epoch_wins(rig: Rig) -> None:
    rig.apply(0, [rendered([("a", {"n": 1}), ("b", {"n": 2})]), rendered([("a", {"n": 3}), ("b", None)])])
    assert rig.stored() == {"a": {"n": 3}}


def test_an_id_in_two_tasks_is_refused_before_anything_is_visible(rig: Rig) -> None:
    with pytest.raises(RowsRejected, match="order_by="):
        rig.prepare(0, [rendered([("a", {"n": 1})])], [rendered([("a", {"n": 2})])])
    assert rig.stored() == {}


def test_order_by_decides_across_tasks(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options, order_by="at"))) as rig:
        rig.apply(0, [rendered([("a", {"n": 1}), ("b", {"n": 2})], [9, 1])], [rendered([("a", {"n": 3})], [4])])
        assert rig.stored() == {"a": {"n": 1}, "b": {"n": 2}}


def test_a_pending_epoch_is_applied_as_it_was_written(options: dict[str, Any], fresh_index: FreshName) -> None:
    """The start that commits it has another index=, no id= and no order_by=: the epoch's own count."""
    with closing(Rig.joining(SmallRequests(**options, order_by="at"))) as rig:
        ranked = (
            [rendered([("a", {"n": 1}), ("b", {"n": 2})], [9, 1])],
            [rendered([("a", {"n": 3}), ("c", None)], [4, 4])],
        )
        prepared = rig.prepare(0, *ranked)
        keyless_options = {name: value for name, value in options.items() if name not in ("key", "delete_when")}
        later = SmallRequests(**{**keyless_options, "index": fresh_index()})
        with closing(Rig(later, rig.identity)) as changed:
            assert changed.commit(prepared).outcome is Outcome.COMMITTED
        assert rig.stored() == {"a": {"n": 1}, "b": {"n": 2}}


def test_without_its_spool_the_marker_tells_what_became_of_an_epoch(rig: Rig) -> None:
    done = rig.apply(0, [rendered(numbered(0, 5))])
    open_ = rig.prepare(1, [rendered(numbered(5, 9))])
    assert rig.committer.commit(done.epoch, done.part, done.rows.gone()).outcome is Outcome.COMMITTED
    with pytest.raises(SpoolMissing):
        rig.committer.commit(open_.epoch, open_.part, open_.rows.gone())
    assert rig.committer.newest() == 0


def test_of_two_copies_of_a_checkpoint_only_the_one_that_claims_an_epoch_first_applies_any_of_it(rig: Rig) -> None:
    """Both have compared marker and ledger, and found nothing of the epoch."""
    first, copy = rig.prepare(0, [rendered(numbered(0, 50))]), rig.another_driver()
    second = copy.prepare(0, [rendered(numbered(20, 70))])
    with pytest.raises(SpoolMissing):
        rig.committer.commit(first.epoch, first.part, first.rows.gone())
    with pytest.raises(WentBack, match=f"by attempt {first.epoch.attempt}, but this ledger records epoch 0"):
        copy.commit(second)
    assert rig.stored() == {}
    assert rig.commit(first).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 50))
    copy.close()


def test_a_copy_that_has_the_input_of_an_epoch_in_a_later_one_does_not_apply_it_a_second_time(rig: Rig) -> None:
    """One copy is applying epoch 0; in the other one, epoch 0 has no rows, and epoch 1 has those of both."""
    first, copy = rig.prepare(0, [rendered(numbered(0, 50))]), rig.another_driver()
    second = copy.prepare(1, [rendered(numbered(0, 70))])
    with pytest.raises(SpoolMissing):
        rig.committer.commit(first.epoch, first.part, first.rows.gone())
    with pytest.raises(WentBack, match=f"epoch 0 of this query is being applied.*by attempt {first.epoch.attempt}"):
        copy.commit(second)
    assert rig.stored() == {}
    assert rig.commit(first).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 50))
    # the next comparison tells it the same
    with pytest.raises(WentBack, match="epoch 0 was applied"):
        copy.committer.verify_applied(None, LastDone(1, second.epoch.attempt, (second.part,)))
    copy.close()


def test_a_copy_that_begins_its_first_epoch_again_after_another_has_finished_that_input_writes_no_row_twice(
    options: dict[str, Any],
) -> None:
    """The server was away for a moment as its first try read the marker."""
    del options["key"], options["delete_when"]
    rows = keyless([{"n": number} for number in range(40)])
    away = threading.Event()

    def behave(seen: Seen) -> Answer | None:
        if marker_document(identity_key(rig.identity)) in seen.path and not away.is_set():
            away.set()
            assert rig.commit(first).outcome is Outcome.COMMITTED
            return Answer(503)
        return None

    with closing(Rig.joining(SmallRequests(**options))) as rig, Proxy(options["hosts"], lambda _: None) as proxy:
        # a driver of another ledger, in which no epoch is done
        copy = OneSink.of(SmallRequests(**{**options, "hosts": proxy.url}), rig.identity.sink)
        copy.open(rig.identity)
        first, second = rig.prepare(5, [rows]), rig.prepare(6, [rows])
        proxy.behave = behave
        with closing(copy), pytest.raises(WentBack):
            copy.commit(second.epoch, second.part, second.rows)
        assert away.is_set()
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(40))
        assert rig.committer.newest() == 5


def test_a_marker_of_another_attempt_is_unknown(rig: Rig) -> None:
    prepared = rig.apply(0, [rendered(numbered(0, 2))])
    other = dataclasses.replace(prepared.epoch, attempt=uuid.uuid4().hex)
    verdict = rig.committer.commit(other, prepared.part, prepared.rows)
    assert verdict.outcome is Outcome.UNKNOWN
    assert prepared.epoch.attempt in verdict.evidence


def test_an_epoch_below_the_marker_is_not_written_again(rig: Rig) -> None:
    rig.apply(3, [rendered(numbered(0, 2))])
    with pytest.raises(WentBack, match="holds epoch 3"):
        rig.prepare(3, [rendered(numbered(0, 2))])


def test_a_spool_with_other_rows_than_recorded_is_not_called_committed(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 5))])
    with pytest.raises(OutcomeUnknown, match="holds 5 rows, but the ledger records 6"):
        rig.committer.commit(prepared.epoch, {**prepared.part, "rows": 6}, prepared.rows)
    assert rig.committer.newest() is None


def test_a_damaged_file_is_found_before_the_driver_sends_anything(
    rig: Rig, options: dict[str, Any], tmp_path: Path
) -> None:
    """An epoch of several requests: those of the first task's rows would be applied before the second file is read."""
    epoch, order, files = _spooled(rig, options, tmp_path, 0, numbered(0, 40))
    second = order["part"]["tasks"][1]
    (file,) = (path for path in tmp_path.rglob("*") if second in path.name)
    file.write_bytes(file.read_bytes()[:-100])
    rows = Spool(str(tmp_path)).rows(rig.identity, epoch, order["part"]["tasks"], files)
    with pytest.raises(SpoolDamaged):
        rig.committer.commit(epoch, order["part"], rows)
    assert rig.stored() == {}
    assert rig.committer.newest() is None


def test_a_marker_that_was_read_a_second_ago_is_read_again_before_a_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile another driver has applied the epoch: sent again, its documents could come back after a deletion."""
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with Proxy(rig.sink.hosts[0], lambda _: None) as proxy, closing(behind(rig, proxy)) as late:
        late.committer.verify_applied(None, LastDone(0, prepared.epoch.attempt, (prepared.part,)))
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
        later = time.monotonic() + 1
        clock = SimpleNamespace(monotonic=lambda: later, time=time.time, sleep=time.sleep)
        monkeypatch.setattr(late.committer.participant, "_clock", clock)
        assert late.commit(prepared).outcome is Outcome.COMMITTED
        assert proxy.bulks == []


def test_a_vote_refuses_a_spool_that_lacks_a_task(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 5))])
    written = [WrittenTask(uuid.uuid4().hex, 5, 10).to_json()]
    with pytest.raises(PrepareFailed, match="but the accepted tasks are"):
        rig.committer.vote(prepared.epoch, written, prepared.rows)


def test_through_a_storm_of_429_each_operation_is_applied_and_only_the_refused_are_sent_again(rig: Rig) -> None:
    overloaded = {"status": 429, "error": {"type": "es_rejected_execution_exception", "reason": "full"}}
    refused: set[str] = set()

    def refuse(name: str) -> bool:
        return name not in refused and int(name[1:]) % 3 == 0

    def behave(seen: Seen) -> Answer | None:
        if not seen.is_bulk:
            return None
        answer = refuse_some(proxy, seen, refuse, overloaded)
        if "items" in seen.path:
            refused.update(name for name in seen.ids if int(name[1:]) % 3 == 0)
        return answer

    with Proxy(rig.sink.hosts[0], behave) as proxy, closing(behind(rig, proxy)) as slow:
        slow.apply(0, [rendered(numbered(0, 60))])
        # Only these are answered operation by operation; their pieces may be of any size.
        sent = Counter(name for seen in proxy.bulks if "items" in seen.path for name in seen.ids)
    assert rig.stored() == dict(numbered(0, 60))
    assert len(refused) == 20
    assert {name: count for name, count in sent.items() if count > 1} == dict.fromkeys(refused, 2)


def test_a_lost_reply_is_no_lost_and_no_doubled_document(options: dict[str, Any]) -> None:
    """The server applies every second request and its answer never arrives."""
    del options["key"], options["delete_when"]
    with closing(Rig.joining(SmallRequests(**options))) as rig:

        def behave(seen: Seen) -> Lost | None:
            return Lost() if seen.is_bulk and len(proxy.bulks) % 2 else None

        with Proxy(options["hosts"], behave) as proxy:
            sink = SmallRequests(**{**options, "hosts": proxy.url})
            with closing(Rig(sink, rig.identity)) as unlucky:
                unlucky.apply(0, [keyless([{"n": number} for number in range(60)])])
        assert sorted(each["n"] for each in rig.stored().values()) == list(range(60))


def test_a_reply_that_comes_too_late_is_no_lost_document(rig: Rig) -> None:
    def behave(seen: Seen) -> Answer | None:
        if seen.is_bulk and len(proxy.bulks) == 1:
            answer = proxy.forward(seen)
            proxy.wake.wait(5)
            return answer
        return None

    # the vote asks once, and has to get its answers in time
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], behave) as proxy,
        closing(behind(rig, proxy, options={"request_timeout": 0.5})) as slow,
    ):
        assert slow.commit(prepared).outcome is Outcome.COMMITTED
        proxy.wake.set()
    assert rig.stored() == dict(numbered(0, 20))


def test_without_any_success_the_epoch_stays_pending_and_can_be_applied_later(rig: Rig) -> None:
    prepared = rig.prepare(0, [rendered(numbered(0, 20))])
    with (
        Proxy(rig.sink.hosts[0], lambda seen: Answer(503) if seen.is_bulk else None) as proxy,
        closing(behind(rig, proxy, timeout=0.5)) as slow,
    ):
        verdict = slow.commit(prepared)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "HTTP 503" in verdict.evidence
    assert rig.committer.newest() is None
    assert rig.commit(prepared).outcome is Outcome.COMMITTED
    assert rig.stored() == dict(numbered(0, 20))


def test_an_epoch_of_many_small_tasks_takes_few_requests(options: dict[str, Any]) -> None:
    with Proxy(options["hosts"], lambda _: None) as proxy:
        rig = Rig.joining(Elasticsearch(**{**options, "hosts": proxy.url}))
        with closing(rig):
            asked = len(proxy.bulks)
            rig.apply(0, *([rendered(numbered(first, first + 3))] for first in range(0, 120, 3)))
            assert len(proxy.bulks) - asked < 5, "a request for each task"
            assert rig.stored() == {f"d{number}": {"n": number} for number in range(120)}


def test_compressed_requests_are_applied(options: dict[str, Any]) -> None:
    with closing(Rig.joining(SmallRequests(**options, options={"http_compress": True}))) as rig:
        rig.apply(0, [rendered(numbered(0, 30))])
        assert rig.stored() == dict(numbered(0, 30))


def test_a_document_with_hostile_id_and_text_comes_back_as_it_went(rig: Rig) -> None:
    hostile = 'x"}}\n{"delete":{"_id":"y"}}\r\n\u2028\\ü\t#?/%'
    rig.apply(0, [rendered([(hostile, {"n": 1, "text": hostile}), ("y", {"n": 2})])])
    assert rig.stored() == {hostile: {"n": 1, "text": hostile}, "y": {"n": 2}}


def _versions(rig: Rig) -> dict[str, int]:
    with closing(connect(rig.sink)) as client:
        client.indices.refresh(index=rig.sink.index)
        found = client.search(index=rig.sink.index, size=1000, version=True, seq_no_primary_term=False)
        return {hit["_id"]: hit["_version"] for hit in found["hits"]["hits"]}


def _forget_marker(rig: Rig) -> None:
    with closing(connect(rig.sink)) as client:
        client.delete(index=applied_epochs.INDEX, id=marker_document(identity_key(rig.identity)))


def _ahead(rig: Rig, number: int, documents: list[Document]) -> Prepared:
    return rig.prepare(number, [rendered(documents)])


def _spooled(
    rig: Rig, options: dict[str, Any], folder: Path, number: int, documents: list[Document]
) -> tuple[Epoch, dict[str, Any], dict[str, SpoolFile]]:
    """Write an epoch of two tasks into a real spool; return it with the order for a process, and its files."""
    epoch = Epoch(number, uuid.uuid4().hex)
    spool = Spool(str(folder))
    spool.make(rig.identity.query_id, epoch)
    middle = len(documents) // 2
    batches = {uuid.uuid4().hex: rendered(documents[:middle]), uuid.uuid4().hex: rendered(documents[middle:])}
    if any(name in dict(documents[:middle]) for name, _ in documents[middle:]):
        batches = {uuid.uuid4().hex: rendered(documents)}
    written, files = [], {}
    for partition, (task, batch) in enumerate(batches.items()):
        identified = Task(rig.identity, epoch, partition, task)
        writer, file = rig.sink.writer(identified), spool.writer(identified, batch.schema)
        file.write(batch)
        writer.write(batch)
        files[task] = file.close()
        written.append(writer.prepare())
    (part,) = rig.committer.vote(epoch, written, spool.rows(rig.identity, epoch, list(batches)))
    identity = {"query_id": rig.identity.query_id, "sink": rig.identity.sink, "origin": dict(rig.identity.origin)}
    done = elasticsearch_rig.DONE.get(identity_key(rig.identity))
    after = dataclasses.asdict(done) if done else None
    order = {"sink": options, "identity": identity, "epoch": dataclasses.asdict(epoch), "part": part, "after": after}
    return epoch, {**order, "spool": str(folder)}, files


def _apply_in_a_process(order: dict[str, Any], crash: str | None) -> subprocess.CompletedProcess[str]:
    program = Path(elasticsearch_rig.__file__).with_name("elasticsearch_apply.py")
    environment = {**os.environ, **({"EPOCHSINK_FAILPOINT": crash} if crash else {})}
    return subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        input=json.dumps(order),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
