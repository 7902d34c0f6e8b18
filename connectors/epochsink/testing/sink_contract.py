"""Test the contract between the engine and a sink. Every sink must pass these cases; run them on yours with pytest.

class TestMySink(SinkContract):
@pytest.fixture
def rig(self, tmp_path):
return MyRig(MySink(...), tmp_path / "spool")     # a `SinkRig`, which says how to see and lose rows
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from epochsink.errors import PrepareFailed, SpoolMissing
from epochsink.sink import Committable, Epoch, Outcome
from epochsink.testing.sink_rig import Rig

QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"
OTHER_QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f002"

MANY: Final = 9_000
"""A number of rows that is large for every sink."""


@dataclass(frozen=True)
class PreparedEpoch:
    """An epoch that a sink has voted for."""

    epoch: Epoch
    tasks: list[str]
    parts: list[Committable]


class Driver:
    """The driver's part of one sink in one generation, without a coordinator."""

    def __init__(self, rig: Rig, generation: int = 1, query: str = QUERY) -> None:
        self.rig = rig
        self.generation = generation
        self.query = query
        self.committer = rig.open(query, generation)

    def write(self, epoch: Epoch, partition: int, rows: list[int]) -> tuple[str, Committable]:
        """Run one task."""
        return self.rig.write(self.query, self.generation, epoch, partition, rows)

    def vote(self, epoch: Epoch, accepted: list[tuple[str, Committable]]) -> PreparedEpoch:
        """Let the sink vote."""
        tasks = [task for task, _ in accepted]
        rows = self.rig.rows(self.query, epoch, tasks)
        return PreparedEpoch(epoch, tasks, self.committer.vote(epoch, [part for _, part in accepted], rows))

    def prepare(self, number: int, *partitions: list[int]) -> PreparedEpoch:
        """Write one task for each partition, and vote."""
        epoch = Epoch(number, uuid.uuid4().hex)
        return self.vote(epoch, [self.write(epoch, partition, rows) for partition, rows in enumerate(partitions)])

    def commit(self, prepared: PreparedEpoch) -> list[Outcome]:
        """Commit every part; return the outcomes."""
        rows = self.rig.rows(self.query, prepared.epoch, prepared.tasks)
        outcomes = [self.committer.commit(prepared.epoch, part, rows).outcome for part in prepared.parts]
        if committed(outcomes):
            self.committer.visible(prepared.epoch, prepared.parts)
        return outcomes

    def replay(self, prepared: PreparedEpoch) -> PreparedEpoch:
        """Prepare every part again."""
        rows = self.rig.rows(self.query, prepared.epoch, prepared.tasks)
        parts = [self.committer.replay(prepared.epoch, part, rows, uuid.uuid4().hex) for part in prepared.parts]
        return PreparedEpoch(prepared.epoch, prepared.tasks, parts)

    def abandon(self, prepared: PreparedEpoch) -> None:
        """Abort an attempt that is not recorded."""
        self.committer.abort_orphans([])
        self.rig.drop_spool(self.query, prepared.epoch)


def committed(outcomes: list[Outcome]) -> bool:
    """Whether every part is committed."""
    return bool(outcomes) and all(outcome is Outcome.COMMITTED for outcome in outcomes)


class SinkContract:
    """The cases."""

    def test_prepared_is_invisible(self, rig: Rig) -> None:
        Driver(rig).prepare(0, [1, 2], [3])
        assert rig.visible() == []

    def test_committed_is_visible(self, rig: Rig) -> None:
        driver = Driver(rig)
        assert committed(driver.commit(driver.prepare(0, [1, 2], [3])))
        assert rig.visible() == [1, 2, 3]

    def test_no_row_of_a_large_task_is_lost(self, rig: Rig) -> None:
        """It begins with few rows, which a sink may send in a different way."""
        driver = Driver(rig)
        assert committed(driver.commit(driver.prepare(0, list(range(MANY)), [MANY])))
        assert rig.visible() == list(range(MANY + 1))

    def test_commit_twice_is_one_commit(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1, 2], [3])
        assert committed(driver.commit(prepared))
        assert committed(driver.commit(prepared))
        assert rig.visible() == [1, 2, 3]

    def test_another_process_commits(self, rig: Rig) -> None:
        prepared = Driver(rig).prepare(0, [1, 2], [3])
        assert committed(Driver(rig, generation=2).commit(prepared))
        assert rig.visible() == [1, 2, 3]

    def test_both_processes_commit(self, rig: Rig) -> None:
        """Any driver, even a superseded one, may commit what is decided and recorded."""
        first = Driver(rig)
        prepared = first.prepare(0, [1, 2], [3])
        second = Driver(rig, generation=2)
        assert committed(second.commit(prepared))
        assert committed(first.commit(prepared))
        assert rig.visible() == [1, 2, 3]

    def test_another_process_commits_after_the_leftovers_are_cleared(self, rig: Rig) -> None:
        first = Driver(rig)
        prepared = first.prepare(0, [1], [2])
        first.commit(prepared)
        first.committer.finish(prepared.epoch, prepared.parts)
        rig.drop_spool(QUERY, prepared.epoch)
        assert committed(Driver(rig, generation=2).commit(prepared))
        assert rig.visible() == [1, 2]

    def test_no_row_of_a_damaged_spool_is_applied(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1, 2], [3])
        if rig.loses:
            rig.lose_prepared()
        rig.damage_spool(QUERY, prepared.epoch, prepared.tasks[-1])
        try:
            refused = Outcome.UNKNOWN in driver.commit(prepared) or not driver.replay(prepared)
        except SpoolMissing:
            refused = True
        assert refused
        driver.committer.abort_orphans([])
        assert rig.visible() == []

    def test_aborted_is_never_committed(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1, 2], [3])
        driver.abandon(prepared)
        with suppress(SpoolMissing):  # the rows of an abandoned attempt are dropped, but a sink may need them
            assert Outcome.COMMITTED not in driver.commit(prepared)
        assert rig.visible() == []

    def test_aborting_twice_is_no_error(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1])
        driver.abandon(prepared)
        driver.abandon(prepared)
        assert rig.leftovers() == []

    def test_an_aborted_epoch_is_written_again(self, rig: Rig) -> None:
        driver = Driver(rig)
        driver.abandon(driver.prepare(0, [1, 2], [3]))
        assert committed(driver.commit(driver.prepare(0, [3, 1], [2])))
        assert rig.visible() == [1, 2, 3]

    def test_sweep_keeps_what_is_kept(self, rig: Rig) -> None:
        driver = Driver(rig)
        kept = driver.prepare(0, [1], [2])
        driver.write(Epoch(1, uuid.uuid4().hex), 0, [3])
        driver.committer.abort_orphans(kept.parts)
        assert committed(driver.commit(kept))
        driver.committer.finish(kept.epoch, kept.parts)
        assert rig.visible() == [1, 2]
        assert rig.leftovers() == []

    def test_sweep_ends_what_older_generations_left(self, rig: Rig) -> None:
        Driver(rig).write(Epoch(0, uuid.uuid4().hex), 0, [1])
        Driver(rig).prepare(0, [2])
        Driver(rig, generation=2).committer.abort_orphans([])
        assert rig.leftovers() == []

    def test_sweep_spares_newer_generations(self, rig: Rig) -> None:
        """A superseded driver that sweeps late, with an old ledger, must not abort what its successor prepared."""
        superseded = Driver(rig)
        successor = Driver(rig, generation=2)
        prepared = successor.prepare(0, [1], [2])
        superseded.committer.abort_orphans([])
        assert committed(successor.commit(prepared))
        assert rig.visible() == [1, 2]

    def test_a_ledger_that_begins_ends_what_a_lost_one_left(self, rig: Rig) -> None:
        """Its driver takes a higher generation than any in the target, whatever its clock says."""
        Driver(rig, generation=7).prepare(0, [1], [2])
        joining = rig.open(QUERY, 0)
        Driver(rig, generation=joining.join().generation + 1).committer.abort_orphans([])
        assert rig.leftovers() == []

    def test_sweep_spares_other_queries(self, rig: Rig) -> None:
        other = Driver(rig, query=OTHER_QUERY)
        prepared = other.prepare(0, [1])
        Driver(rig, generation=9).committer.abort_orphans([])
        assert committed(other.commit(prepared))
        assert rig.visible() == [1]

    def test_sweep_keeps_what_is_visible(self, rig: Rig) -> None:
        driver = Driver(rig)
        driver.commit(driver.prepare(0, [1]))
        Driver(rig, generation=2).committer.abort_orphans([])
        assert rig.visible() == [1]

    def test_newest_is_the_last_epoch_committed(self, rig: Rig) -> None:
        driver = Driver(rig)
        assert driver.committer.newest() is None
        prepared = driver.prepare(0, [1], [2])
        assert driver.committer.newest() is None
        driver.commit(prepared)
        assert driver.committer.newest() == 0
        driver.commit(driver.prepare(7, [3]))
        assert Driver(rig, generation=2).committer.newest() == 7

    def test_a_new_checkpoint_on_the_old_target(self, rig: Rig) -> None:
        """Its epoch 0 is never mistaken for the old checkpoint's."""
        old = Driver(rig)
        old.commit(old.prepare(0, [1]))
        old.commit(old.prepare(1, [2]))
        new = Driver(rig, query=OTHER_QUERY)
        assert new.committer.newest() is None
        assert committed(new.commit(new.prepare(0, [3])))
        assert rig.visible() == [1, 2, 3]

    def test_epochs_follow_each_other(self, rig: Rig) -> None:
        driver = Driver(rig)
        for number in range(4):
            prepared = driver.prepare(number, [2 * number], [2 * number + 1])
            driver.committer.abort_orphans(prepared.parts)
            assert committed(driver.commit(prepared))
            driver.committer.finish(prepared.epoch, prepared.parts)
        assert rig.visible() == list(range(8))
        assert rig.leftovers() == []

    def test_the_losing_attempt_stays_invisible(self, rig: Rig) -> None:
        """Two attempts of one task have prepared; Spark accepted the second."""
        driver = Driver(rig)
        epoch = Epoch(0, uuid.uuid4().hex)
        driver.write(epoch, 0, [1])
        winner = driver.write(epoch, 0, [1])
        other = driver.write(epoch, 1, [2])
        prepared = driver.vote(epoch, [winner, other])
        driver.committer.abort_orphans(prepared.parts)
        assert committed(driver.commit(prepared))
        assert rig.visible() == [1, 2]

    def test_a_late_losing_attempt_doubles_nothing(self, rig: Rig) -> None:
        """If names are limited, it may cause a replay. It neither changes rows nor hides them from readers."""
        driver = Driver(rig)
        epoch = Epoch(0, uuid.uuid4().hex)
        prepared = driver.vote(epoch, [driver.write(epoch, 0, [1])])
        driver.write(epoch, 0, [1])
        if not committed(driver.commit(prepared)):
            prepared = driver.replay(prepared)
            assert committed(driver.commit(prepared))
        assert rig.visible() == [1]
        driver.committer.abort_orphans(prepared.parts)
        assert rig.visible() == [1]

    def test_rows_keep_the_order_of_their_task(self, rig: Rig) -> None:
        """In an epoch, in the next one, and after they were lost and prepared again, if the sink promises an order."""
        driver = Driver(rig)
        epochs = [list(range(99, -1, -1)), list(range(1000, 1100))], [list(range(2099, 1999, -1)), [3000]]
        prepared = driver.prepare(0, *epochs[0])
        if rig.loses:
            rig.lose_prepared()
            assert set(driver.commit(prepared)) == {Outcome.ABORTED}
            prepared = driver.replay(prepared)
        assert committed(driver.commit(prepared))
        assert committed(driver.commit(driver.prepare(1, *epochs[1])))
        assert rig.visible() == sorted(row for tasks in epochs for rows in tasks for row in rows)
        for sequence in rig.in_order() if rig.keeps_order else ():
            later = [any(row in rows for rows in epochs[1]) for row in sequence]
            assert later == sorted(later), "a row is before one of an earlier epoch"
            for rows in (rows for tasks in epochs for rows in tasks):
                ordered = [row for row in sequence if row in rows]
                assert ordered == [row for row in rows if row in ordered], "the rows of a task are in a different order"

    def test_what_is_lost_is_replayed_once(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1, 2], [3])
        if not rig.loses:
            assert committed(driver.commit(prepared))
            return
        rig.lose_prepared()
        assert set(driver.commit(prepared)) == {Outcome.ABORTED}
        replayed = driver.replay(prepared)
        assert rig.visible() == []
        assert committed(driver.commit(replayed))
        assert committed(driver.commit(replayed))
        # A superseded driver that still holds the lost parts must not be asked to prepare them again.
        assert Outcome.ABORTED not in driver.commit(prepared)
        assert rig.visible() == [1, 2, 3]

    def test_a_replay_is_lost_too(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1, 2], [3])
        if not rig.loses:
            assert committed(driver.commit(prepared))
            return
        rig.lose_prepared()
        first = driver.replay(prepared)
        rig.lose_prepared()
        assert Outcome.COMMITTED not in driver.commit(first)
        second = Driver(rig, generation=2)
        assert committed(second.commit(second.replay(first)))
        assert rig.visible() == [1, 2, 3]

    def test_the_vote_notices_a_loss(self, rig: Rig) -> None:
        """A task's prepared rows are lost before the vote, which must refuse the epoch or prepare it from the spool."""
        driver = Driver(rig)
        epoch = Epoch(0, uuid.uuid4().hex)
        written = [driver.write(epoch, 0, [1])]
        driver.committer.abort_orphans([])
        expected = [1]
        try:
            prepared = driver.vote(epoch, written)
        except PrepareFailed:
            assert rig.loses, "the vote refused rows that the target cannot lose"
            expected = []
        else:
            assert rig.visible() == []
            assert committed(driver.commit(prepared)), "the vote did not notice that a task's prepared rows are lost"
        assert rig.visible() == expected

    def test_committed_parts_are_not_lost(self, rig: Rig) -> None:
        driver = Driver(rig)
        prepared = driver.prepare(0, [1])
        driver.commit(prepared)
        if rig.loses:
            rig.lose_prepared()
        assert committed(driver.commit(prepared))
        assert rig.visible() == [1]
