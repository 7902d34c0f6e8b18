"""Mutants of the rules against a world that goes back, a second copy, and users who misuse us."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from epochsink.protocol.commits import Commits
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.sink import (
    Ballot,
    Epoch,
    Recorded,
    Remnant,
    SpoolFile,
)
from simulation.storage import MemorySpool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.sink import Identity, Participant
    from simulation.storage import MemoryRows


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

        def refuse_and_compare(history: LedgerHistory) -> None:
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

    def refuse_undocumented(self, history: LedgerHistory) -> None:
        pass

    def refuse_gap(self, history: LedgerHistory, running: int) -> None:
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
            participant.remnants = partial(_of_pending, participant.remnants)  # type: ignore[method-assign]


def _of_pending(remnants: Any, recorded: Recorded) -> Sequence[Remnant]:
    found: Sequence[Remnant] = remnants((recorded[0], []))
    return found


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
