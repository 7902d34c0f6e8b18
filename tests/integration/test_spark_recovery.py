"""What a start makes of what the last run left: commit, adopt, or stop loudly before any row moves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from folder_sink import FolderSink
from pyspark.errors import StreamingQueryException
from streams import Stream, raising_after
from waiting import wait_until

from epochsink.cli.abandon import Abandonment
from epochsink.cli.checkpoint_folder import open_place
from epochsink.errors import ConfigurationError, Fenced, OutcomeUnknown, WentBack
from epochsink.protocol import commit_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.connect

TRIES = 9
"""More than a run and the recovery at its end take, which on Spark Connect is a try of its own."""


def three_epochs(stream: Stream) -> None:
    for first in (0, 10, 20):
        stream.put(range(first, first + 10))
    stream.run()


def with_an_undecided_epoch(stream: Stream) -> None:
    """Epochs 0 and 1 are done, 2 is recorded, and commits/2 was never written."""
    for first in (0, 10, 20):
        stream.put(range(first, first + 10))
    once = stream.exactly_once()
    with pytest.raises(StreamingQueryException, match="Boom"):
        stream.by_hand(raising_after(once, 2)).awaitTermination()
    stream.settle(once)
    assert stream.committed() == stream.done() == [0, 1]
    assert stream.sink.values() == list(range(20))


def test_a_start_commits_a_decided_epoch_even_if_no_batch_ever_comes(stream: Stream) -> None:
    stream.sink.faults.arm("commit-unknown", TRIES)
    stream.put(range(10))
    with pytest.raises(OutcomeUnknown, match="did not answer within 1 s"):
        stream.run()
    assert stream.committed() == [0]
    assert stream.sink.rows() == []
    stream.sink.faults.disarm("commit-unknown")
    query = stream.start_endless(stream.exactly_once())
    assert stream.sink.values() == list(range(10))
    assert stream.done() == [0]
    query.stop()


def test_recover_by_hand_commits_it_too(stream: Stream) -> None:
    """For a foreachBatch made by hand: nothing calls us before the first batch."""
    stream.sink.faults.arm("commit-unknown", TRIES)
    stream.put(range(10))
    with pytest.raises(OutcomeUnknown):
        stream.run()
    stream.sink.faults.disarm("commit-unknown")
    once = stream.exactly_once()
    once.recover(stream.spark)
    assert stream.sink.values() == list(range(10))
    stream.put(range(10, 20))
    stream.by_hand(once).awaitTermination()
    stream.settle(once)
    assert stream.sink.values() == list(range(20))


def test_a_recorded_undecided_epoch_is_adopted(stream: Stream) -> None:
    """The recorded attempt stands: the plan runs for its state, nothing is written again."""
    with_an_undecided_epoch(stream)
    recorded = next(entry for entry in stream.ledger() if entry["entry"] == "prepared" and entry["epoch"] == 2)
    stream.put(range(30, 40))
    stream.run()
    assert stream.sink.values() == list(range(40))
    assert {row["attempt"] for row in stream.sink.rows() if row["epoch"] == 2} == {recorded["attempt"]}
    assert stream.sink.calls("vote") == ["0", "1", "2", "3"]
    assert stream.done() == [0, 1, 2, 3]


def test_an_adopted_epoch_may_be_interrupted_again(stream: Stream) -> None:
    with_an_undecided_epoch(stream)
    once = stream.exactly_once()
    with pytest.raises(StreamingQueryException, match="Boom"):
        stream.by_hand(raising_after(once, 2)).awaitTermination()
    stream.settle(once)
    assert stream.sink.values() == list(range(20))
    stream.run()
    assert stream.sink.values() == list(range(30))
    assert stream.sink.calls("vote") == ["0", "1", "2"]


def test_a_restored_checkpoint_with_the_same_input_writes_nothing_twice(stream: Stream) -> None:
    """commits/2 is gone, epoch 2 is done: Spark runs it again."""
    three_epochs(stream)
    stream.forget_commit(2)
    stream.put(range(30, 40))
    stream.run()
    assert stream.sink.values() == list(range(40))
    assert stream.sink.calls("vote") == ["0", "1", "2", "3"]


def test_a_checkpoint_restored_from_an_older_copy_writes_nothing_twice(stream: Stream) -> None:
    """The last two epochs are planned anew, and get the same files."""
    three_epochs(stream)
    for epoch in (1, 2):
        stream.forget_commit(epoch)
        stream.forget_offsets(epoch)
    stream.run()
    assert stream.committed() == [0, 1, 2]
    assert stream.sink.values() == list(range(30))
    assert stream.sink.calls("vote") == ["0", "1", "2"]


def test_a_restored_checkpoint_with_other_input_is_refused(stream: Stream) -> None:
    """A file source's offset is a mere number: the files behind it have changed."""
    three_epochs(stream)
    stream.forget_commit(2)
    stream.forget_offsets(2)
    (stream.input / "000002.json").unlink()
    stream.put(range(100, 110))
    with pytest.raises(WentBack, match="epoch 2 is recorded with other offsets"):
        stream.run()
    assert stream.sink.values() == list(range(30))


def test_other_numbers_in_the_offsets_are_refused(stream: Stream) -> None:
    three_epochs(stream)
    stream.forget_commit(2)
    offsets = stream.checkpoint / "offsets" / "2"
    offsets.write_text(offsets.read_text().replace('"logOffset":2', '"logOffset":1'))
    (stream.checkpoint / "offsets" / ".2.crc").unlink()
    with pytest.raises(WentBack, match="epoch 2 is recorded with other offsets"):
        stream.run()
    assert stream.sink.values() == list(range(30))


def test_commits_newer_than_the_ledger_are_refused(stream: Stream) -> None:
    """The folder epochsink/ comes from an older copy than the rest."""
    three_epochs(stream)
    entries = sorted((stream.checkpoint / "epochsink" / "ledger").glob("[0-9]*"))
    # not the last two: epoch 1's "done" may come after epoch 2's "prepared"
    recorded = [json.loads(entry.read_text()) for entry in entries]
    oldest = next(i for i, one in enumerate(recorded) if one["entry"] == "prepared" and one["epoch"] == 2)
    for entry in entries[oldest:]:
        entry.unlink()
    with pytest.raises(WentBack, match=r"decided epochs up to 2 .* up to 1: the ledger is the older copy"):
        stream.run()


def test_a_target_newer_than_the_ledger_is_refused(stream: Stream) -> None:
    """The whole checkpoint comes from an older copy: what it would write next, the target already has."""
    three_epochs(stream)
    older = stream.folder / "older"
    shutil.copytree(stream.checkpoint, older)
    stream.put(range(30, 40))
    stream.run()
    shutil.rmtree(stream.checkpoint)
    older.rename(stream.checkpoint)
    with pytest.raises(WentBack, match="already holds epoch 3 of this query"):
        stream.run()
    assert stream.sink.values() == list(range(40))


def test_the_ledger_of_another_query_is_refused(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> None:
    three_epochs(stream)
    other = Stream(stream.spark, tmp_path_factory.mktemp("other"))
    other.put(range(10))
    other.run()
    shutil.rmtree(other.checkpoint / "epochsink")
    shutil.copytree(stream.checkpoint / "epochsink", other.checkpoint / "epochsink")
    with pytest.raises(WentBack, match="the ledger in this checkpoint belongs to query id"):
        other.run()


def test_a_deleted_metadata_file_is_refused(stream: Stream) -> None:
    """Spark 4.0 would go on with a new query id and the old numbers."""
    three_epochs(stream)
    (stream.checkpoint / "metadata").unlink()
    (stream.checkpoint / ".metadata.crc").unlink()
    stream.put(range(30, 40))
    with pytest.raises(WentBack, match="the ledger in this checkpoint belongs to query id"):
        stream.run()
    assert stream.sink.values() == list(range(30))
    assert not (stream.checkpoint / "metadata").exists(), "it can be put back"


def test_a_new_checkpoint_on_the_old_target_swallows_nothing(stream: Stream) -> None:
    """Its epoch 0 is never taken for the old one's: the same input comes once more, as asked for."""
    three_epochs(stream)
    shutil.rmtree(stream.checkpoint)
    stream.run()
    assert stream.sink.values() == sorted([*range(30), *range(30)])


def plain_first(stream: Stream) -> list[int]:
    target = str(stream.folder / "plain")

    def append(frame: DataFrame, epoch: int) -> None:
        frame.write.json(f"{target}-{epoch}")

    stream.put(range(10))
    stream.by_hand(append).awaitTermination()
    return [row["id"] for row in stream.spark.read.json(f"{target}-0").collect()]


def test_commits_without_a_ledger_are_refused(stream: Stream) -> None:
    plain_first(stream)
    stream.put(range(10, 20))
    with pytest.raises(WentBack, match=r"join_running=True"):
        stream.run()
    assert stream.sink.rows() == []


def test_join_running_adds_epochsink_to_a_running_pipeline(stream: Stream) -> None:
    seen = plain_first(stream)
    stream.put(range(10, 20))
    stream.run(stream.exactly_once(join_running=True))
    stream.put(range(20, 30))
    stream.run()
    assert sorted(seen) == list(range(10))
    assert stream.sink.values() == list(range(10, 30))


def test_joining_where_the_old_code_stopped_in_an_epoch_is_refused_until_that_is_allowed(stream: Stream) -> None:
    def fail(frame: DataFrame, epoch: int) -> None:
        raise RuntimeError(f"Boom {epoch} {frame.columns}")

    plain_first(stream)
    stream.put(range(10, 20))
    with pytest.raises(StreamingQueryException, match="Boom"):
        stream.by_hand(fail).awaitTermination()
    with pytest.raises(ConfigurationError, match="epoch 1 was begun before epochsink joined"):
        stream.run(stream.exactly_once(join_running=True))
    stream.run(stream.exactly_once(join_running="rewrite"))
    assert stream.sink.values() == list(range(10, 20))


def test_a_sink_added_between_runs_gets_the_epochs_from_then_on(stream: Stream) -> None:
    with_an_undecided_epoch(stream)
    added = FolderSink(str(stream.folder / "added"))
    stream.put(range(30, 40))
    stream.run(stream.exactly_once({"folder": stream.sink, "added": added}))
    assert stream.sink.values() == list(range(40))
    assert added.values() == list(range(30, 40))


def test_a_sink_may_be_removed_when_it_owes_nothing(stream: Stream) -> None:
    other = FolderSink(str(stream.folder / "other"))
    stream.put(range(10))
    stream.run(stream.exactly_once({"folder": stream.sink, "other": other}))
    stream.put(range(10, 20))
    stream.run()
    stream.put(range(20, 30))
    stream.run(stream.exactly_once({"folder": stream.sink, "other": other}))
    assert stream.sink.values() == list(range(30))
    assert other.values() == [*range(10), *range(20, 30)]


def test_a_removed_sink_with_a_pending_epoch_is_refused(stream: Stream) -> None:
    """With the hint: start once more with it."""
    other = FolderSink(str(stream.folder / "other"))
    other.faults.arm("commit-unknown", TRIES)
    both: dict[str, Any] = {"folder": stream.sink, "other": other}
    stream.put(range(10))
    with pytest.raises(OutcomeUnknown):
        stream.run(stream.exactly_once(both))
    with pytest.raises(ConfigurationError, match="sink 'other', which this query no longer has") as refused:
        stream.run()
    assert "start once more with the sink 'other'" in refused.value.hint
    other.faults.disarm("commit-unknown")
    stream.run(stream.exactly_once(both))
    assert other.values() == stream.sink.values() == list(range(10))


def test_an_older_driver_is_fenced(stream: Stream) -> None:
    """It records nothing more, and what it prepared is ended by the newer one."""
    older = stream.exactly_once()
    stream.put(range(10))
    query = stream.start_endless(older)
    query.processAllAvailable()
    stream.sink.faults.arm("write")
    stream.put(range(10, 20))
    wait_until(lambda: stream.sink.faults.reached("write"), "a task writes")
    newer = stream.exactly_once()
    newer.recover(stream.spark)
    stream.sink.faults.disarm("write")
    with pytest.raises(Fenced, match="another driver has taken over this checkpoint"):
        query.awaitTermination()
    assert stream.sink.values() == list(range(10))
    stream.run(newer)
    assert stream.sink.values() == list(range(20))
    assert stream.sink.prepared() == []


def test_what_a_target_lost_is_prepared_again_from_the_spool(stream: Stream) -> None:
    stream.sink.faults.arm("commit")
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    wait_until(lambda: stream.sink.faults.reached("commit"), "the commit begins")
    for path in (stream.folder / "sink" / "prepared").glob("*/*"):
        path.unlink()
    stream.sink.faults.disarm("commit")
    query.processAllAvailable()
    query.stop()
    assert stream.sink.calls("replay") == ["0"]
    assert stream.sink.values() == list(range(10))


def test_few_rows_that_a_target_lost_are_prepared_again_from_the_ledger(stream: Stream) -> None:
    """From a run's second epoch on, they ride in its tasks' answers: the spool's folder stays empty."""
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    query.processAllAvailable()
    stream.sink.faults.arm("commit")
    stream.put(range(10, 20))
    wait_until(lambda: stream.sink.faults.reached("commit"), "the commit of the second epoch begins")
    assert list((stream.checkpoint / "epochsink" / "spool").rglob("*.arrow")) == []
    for path in (stream.folder / "sink" / "prepared").glob("*/*"):
        path.unlink()
    stream.sink.faults.disarm("commit")
    wait_until(lambda: stream.sink.values() == list(range(20)), "the rows are there again")
    query.stop()
    query.awaitTermination()
    assert stream.sink.calls("replay") == ["1"]


def test_without_spool_a_lost_epoch_stops_the_query_and_says_so(stream: Stream) -> None:
    sink = replace(stream.sink, spool=False)
    sink.faults.arm("commit")
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once({"folder": sink}))
    wait_until(lambda: sink.faults.reached("commit"), "the commit begins")
    for path in (stream.folder / "sink" / "prepared").glob("*/*"):
        path.unlink()
    sink.faults.disarm("commit")
    with pytest.raises(Exception, match="the spool of epoch 0") as stopped:
        query.awaitTermination()
    assert "epochsink resolve" in str(stopped.value)


def test_a_changed_spool_file_stops_the_replay_and_names_the_file(stream: Stream) -> None:
    """What the tasks summed up while they wrote is in the ledger, and compared before a row is replayed."""
    stream.sink.faults.arm("commit")
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    wait_until(lambda: stream.sink.faults.reached("commit"), "the commit begins")
    for path in (stream.folder / "sink" / "prepared").glob("*/*"):
        path.unlink()
    for path in (stream.checkpoint / "epochsink" / "spool").rglob("*.arrow"):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    stream.sink.faults.disarm("commit")
    with pytest.raises(Exception, match=r"was cut or changed: it was written with \d+ bytes"):
        query.awaitTermination()
    assert stream.sink.values() == []


@pytest.mark.classic("shortens a pause in the process of the run")
def test_a_running_query_that_is_abandoned_stops_with_the_reason_and_leaves_nothing(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle, so that no epoch would tell it: the commit thread's look for leftovers does."""
    monkeypatch.setattr(commit_thread, "TIDY_SECONDS", 0.1)
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    query.processAllAvailable()
    with open_place(stream.url) as place:
        Abandonment(place, sinks={"folder": stream.sink}, gone=[]).carry_out()
    with pytest.raises(Fenced, match="an operator has abandoned this checkpoint"):
        query.awaitTermination(60)
    assert "an operator has abandoned this checkpoint" in str(query.exception())
    stream.put(range(10, 20))
    with pytest.raises(ConfigurationError, match="this checkpoint was abandoned"):
        stream.run()
    assert stream.sink.values() == list(range(10))
    assert stream.sink.prepared() == []
