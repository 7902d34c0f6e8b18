"""Mutants of the rules against a world that goes back, a second copy, and users who misuse us."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from epochsink.protocol.commits import Commits
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.sink import COMMITTED, Ballot, Committable, Epoch, LastDone, Mark, Rows, SpoolFile, Verdict
from simulation.driver import SLOTS
from simulation.kafka_port import KafkaPort
from simulation.postgres_port import PreparedPort, StagedPort
from simulation.search_port import KeyedSearchPort, SearchPort
from simulation.sink_mutants import KafkaLeavesLosers, KafkaSweepsNewer
from simulation.storage import MemorySpool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Identity, Participant
    from simulation.readers import Row
    from simulation.storage import MemoryRows


def _epoch(mark: Mark) -> int:
    return mark.epoch


# ---- the coordinator


class IgnoresMarkersInCommit(Commits):
    """Commits without a look at what the targets hold, before it and after it."""

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        check: Any = self._check
        check.verify_before_commit = lambda number, name: None  # noqa: ARG005 - that is the mutation
        run: Any = self._run
        made = run.ballots

        def without_after(*asked: Any) -> dict[str, Ballot]:
            return {name: replace(ballot, after=None) for name, ballot in made(*asked).items()}

        run.ballots = without_after
        try:
            return super()._commit_parts(number, participant, names)
        finally:
            del run.ballots


class ComparesNothing(Coordinator):
    """Never compares the targets' markers with the ledger, and does not tell the sinks what must be there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        commits: Any = self._commits
        commits.__class__ = IgnoresMarkersInCommit
        self.stop_comparing()

    def stop_comparing(self) -> None:
        """Compare no more."""
        self._check.__dict__ |= dict.fromkeys(("verify", "verify_all"), lambda *_: None)

    def compare(self) -> None:
        """Compare from here on."""
        del self._check.__dict__["verify"], self._check.__dict__["verify_all"]


class ComparesAtTheStart(ComparesNothing):
    """Compares them when it starts, and never again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        refuse = self._refuse_disagreement

        def refuse_and_compare(history: History) -> None:
            self.compare()
            refuse(history)
            self.stop_comparing()

        self._refuse_disagreement = refuse_and_compare  # type: ignore[method-assign]


class ComparesBeforeASweep(ComparesNothing):
    """Compares them in each epoch, before it sweeps, and nowhere else."""

    def settle(self, number: int) -> Plan:
        self.compare()
        try:
            return super().settle(number)
        finally:
            self.stop_comparing()


class IgnoresWhatSparkDecidedAlone(AppliedCheck):
    """Never asks whether everything that is decided is in the ledger."""

    def refuse_undocumented(self, history: History) -> None:
        pass


class LetsErrorsBeSwallowed(Commits):
    """Raises in the stream thread alone."""

    def _refuse_swallowed(self) -> None:
        pass


class KeepsHalfARecord(Coordinator):
    """Lets the record of an epoch stand in which it was called twice."""

    def dispute(self, number: int) -> None:
        pass


class JoinsAnyTarget(AppliedCheck):
    """Begins a ledger without asking the targets whether there must have been one."""

    def refuse_known_targets(self) -> None:
        pass


class SweepsDoneParts(Coordinator):
    """Does not tell the sinks which parts belong to done epochs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for participant in self._run.participants:
            participant.abort_orphans = partial(_swept, participant.abort_orphans)  # type: ignore[method-assign]


def _swept(sweep: Any, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:  # noqa: ARG001 - that is it
    ended: list[str] = sweep(keep)
    return ended


# ---- the spool


class Unverified(MemorySpool):
    """Reads whatever stands in a file."""

    def rows(
        self,
        identity: Identity,
        epoch: Epoch,
        tasks: Sequence[str],
        files: Mapping[str, SpoolFile] = MappingProxyType({}),
    ) -> MemoryRows:
        return super().rows(identity, epoch, tasks)


# ---- Kafka


class KafkaSeesOneEpoch(KafkaLeavesLosers):
    """Looks after its commit for this epoch alone."""

    def expect_both(self, this: LastDone, after: LastDone | None) -> None:
        super().expect_both(this, None)


class KafkaSeesNothing(KafkaPort):
    """Does not look after its commit."""

    def expect_both(self, this: LastDone, after: LastDone | None) -> None:
        pass


class KafkaComparesTheHighest(KafkaPort):
    """Takes the highest marker of any partition for that of each."""

    def marks(self) -> dict[tuple[int, int], Mark]:
        found = super().marks()
        newest = {side: max((mark for (_, at), mark in found.items() if at == side), key=_epoch) for _, side in found}
        return {(partition, side): newest[side] for partition in range(SLOTS) for side in newest}


class KafkaAnyWriter(KafkaPort):
    """Does not ask who wrote a marker."""

    def marks(self) -> dict[tuple[int, int], Mark]:
        return {place: replace(mark, attempt="") for place, mark in super().marks().items()}

    def expect_both(self, this: LastDone, after: LastDone | None) -> None:
        pass


class KafkaUnfenced(KafkaPort):
    """Shuts no driver out that runs on another copy of the checkpoint."""

    def fence(self) -> None:
        pass


class KafkaAnyWriterUnfenced(KafkaUnfenced, KafkaAnyWriter):
    """Does neither."""


class KafkaSweepsNewerUnfenced(KafkaUnfenced, KafkaSweepsNewer):
    """Sweeps what newer generations have left, with no fence that would keep it from that."""


class KafkaLooksOnce(KafkaPort):
    """Does not look at the fence after it has prepared something again."""

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        fenced_at, self.fenced_at = self.fenced_at, 0
        try:
            return super().replay(epoch, part, rows, attempt, after)
        finally:
            self.fenced_at = fenced_at


class KafkaSweepsAnyway(KafkaPort):
    """Sweeps when another driver has taken the fence, too."""

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        fenced_at, self.fenced_at = self.fenced_at, 0
        try:
            return super().abort_orphans(keep, done)
        finally:
            self.fenced_at = fenced_at


class KafkaIgnoresNewer(KafkaPort):
    """Goes on beside what a later generation has open."""

    def refuse_newer(self) -> None:
        pass


class KafkaRollsBackDone(KafkaPort):
    """Aborts what a done epoch had."""

    def refuse_done(self, gone: Sequence[tuple[str, int]], done: Sequence[Committable]) -> None:
        pass


class KafkaOtherOptions(KafkaPort):
    """Writes again under the options of this start."""

    def options_of(self, part: Committable) -> int:
        return self.options


# ---- PostgreSQL


class PreparedRollsBackDone(PreparedPort):
    """Rolls back what a done epoch had."""

    def refuse_done(self, gone: Sequence[str], done: Sequence[Committable]) -> None:
        pass

    def finish_again(self, done: LastDone) -> bool:
        return False


class PreparesBlindly(PreparedPort):
    """Does not look for the epoch before in the transaction that it prepares."""

    def prepare(self, epoch: Epoch, part: Committable, after: LastDone | None = None) -> Committable:
        return super().prepare(epoch, part, None)


class MergesBlindly(StagedPort):
    """Does not look for the epoch before in the transaction that merges."""

    def merge(self, epoch: Epoch, part: Committable, after: Mark | None) -> str:
        return super().merge(epoch, part, None)


class StagedAnyWriter(StagedPort):
    """Does not ask who wrote a marker."""

    def judge(self, epoch: Epoch, part: Committable, evidence: str) -> Verdict:
        verdict = super().judge(epoch, part, evidence)
        return COMMITTED if "the marker of attempt" in verdict.evidence else verdict

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        pass


class StagedOtherOptions(StagedPort):
    """Merges under the options of this start."""

    def options_of(self, part: Committable) -> int:
        return self.options


# ---- Elasticsearch


class SearchMarksBlindly(SearchPort):
    """Writes the marker whatever stands there."""

    def write_mark(self, mark: Mark, incarnation: int, seen: Mark | None) -> str:
        key, target = self._key, self.target

        def apply() -> str:
            answer: str = target.mark(key, mark, incarnation, target.marker(key))
            return answer

        return self._step("E mark", apply)


class SearchClaimsNothing(SearchPort):
    """Applies an epoch though another driver may be applying it, too."""

    def claim(self, mark: Mark, done: int) -> None:
        pass


class SearchAnyIncarnation(SearchPort):
    """Does not compare the index' incarnation at the two ends of an apply, nor with its marker."""

    def _incarnation(self) -> int:
        return 0


class SearchAnySetting(SearchPort):
    """Does not judge the settings of the index, after check()."""

    takes_any_setting = True


class SearchAnyWriter(SearchPort):
    """Does not ask who wrote the marker."""

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        pass

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        verdict = super().commit(epoch, part, rows)
        return COMMITTED if "the marker of attempt" in verdict.evidence else verdict


class SearchOtherOptions(SearchPort):
    """Applies an epoch under the options of this start."""

    def options_of(self, part: Committable) -> int:
        return self.options


class SearchAsksNoLedger(KeyedSearchPort):
    """Asks only the marker whether a later epoch has written a document: a restore may have taken the marker away."""

    def open(self, identity: Identity) -> None:
        super().open(identity)
        self.require_ours = lambda: None


class SearchGivesWay(KeyedSearchPort):
    """Takes every 409 for a later epoch of its own."""

    def _overwrite(self, epoch: Epoch, version: int, refused: list[tuple[str, Row]]) -> bool:
        return True
