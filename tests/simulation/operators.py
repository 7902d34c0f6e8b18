"""What operators type, in one step: their own commands die in tests of their own."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from epochsink.cli.abandon import Abandonment
from epochsink.cli.accept import Acceptance
from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.resolve import Resolution, Ruling
from epochsink.errors import ConfigurationError, EpochsinkError, WentBack
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Chosen
from simulation.sinks import participant_of
from simulation.steps import at_once
from simulation.storage import MemoryFiles, MemorySpool
from simulation.world import Spooled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.cli.repair import Repair
    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.sink import Identity, Participant, Retried
    from simulation.driver import Variant
    from simulation.sinks import SimulatedSink
    from simulation.world import World


def place_of(world: World, query: str) -> QueryCheckpoint:
    """Return the checkpoint as a command opens it."""
    return _opened(MemoryFiles(world.files, at_once), MemorySpool(world, at_once), query)


def history_of(world: World) -> LedgerHistory:
    """Read the ledger."""
    return Ledger(MemoryFiles(world.files, at_once), "operator").read()


def _opened(files: MemoryFiles, spool: MemorySpool, query: str) -> QueryCheckpoint:
    return QueryCheckpoint(files, "checkpoint", spool, query)  # type: ignore[arg-type] # in memory


def accept(world: World, query: str) -> int | None:
    """Type ``epochsink accept`` with the newest decided epoch, if the ledger lacks it; return that epoch."""
    place = place_of(world, query)
    newest = place.checkpoint.newest_decided()
    history = history_of(world)
    if history.owner is None or history.newest >= newest:
        return None
    Acceptance(place, newest, None, {}).carry_out()
    return newest


def accept_target(world: World, query: str, sink: str, number: int) -> None:
    """Type ``epochsink accept --sink``."""
    Acceptance(place_of(world, query), number, sink, {}).carry_out()


def discard(world: World, query: str, sink: str, number: int) -> None:
    """Type ``epochsink resolve --as discard``, without sinks."""
    with TemporaryDirectory() as folder:
        Resolution(
            place_of(world, query), epoch=number, sink=sink, ruling=Ruling.DISCARD, sinks={}, folder=Path(folder)
        ).carry_out()


def abandon(world: World, kinds: Mapping[str, type[SimulatedSink]], query: str) -> None:
    """Type ``epochsink abandon``."""
    sinks = {letter: kind(world, at_once) for letter, kind in kinds.items()}
    Abandonment(place_of(world, query), sinks=configured(sinks), gone=[]).carry_out()


def retry_letters(world: World, kind: Any, identity: Identity) -> Retried:
    """Type ``epochsink letters retry``."""
    participant = participant_of({identity.sink: kind(world, at_once)})
    participant.open(identity)
    letters = participant.operator().letters(identity.sink)
    assert letters is not None
    letters.applied = history_of(world).applied.get(identity.sink)
    return letters.retry(Chosen())


def configured(sinks: Mapping[str, SimulatedSink]) -> Any:
    """Return sinks as a command is given them."""

    def participant(members: Mapping[str, Any]) -> Participant:
        return participant_of({name: sinks[name] for name in members})

    return {letter: SimpleNamespace(commits_with=sink.group, participant=participant) for letter, sink in sinks.items()}


class Died(BaseException):
    """A command was killed."""


class Repairs:
    """``epochsink repair``, killed at some steps, one after another, and typed again each time.

    ``refusal`` is what it has refused with in the end; None if it has ended well.
    """

    def __init__(self, world: World, kinds: Mapping[str, type[SimulatedSink]], query: str, variant: Variant) -> None:
        self._world, self._kinds, self._query, self._variant = world, kinds, query, variant
        self._dies_at = list(variant.dies_in_repair)
        spool = Spooled({key: dict(kept) for key, kept in world.spool.items()})
        spool.records = dict(world.spool.records)
        files = {folder: dict(content) for folder, content in world.files.items()}
        self._copies = [(world.files, world.spool), (files, spool)]
        self.refusal: EpochsinkError | None = None

    def play(self) -> int:
        """Type it until it is not killed any more, and once more; return how many epochs were lacking at first."""
        lacked = 0
        while self.refusal is None:
            try:
                repair = self._typed()
                lacked = lacked or len(repair.plan()) - 2
                repair.carry_out()
            except Died:
                continue
            except EpochsinkError as refused:
                self.refusal = refused
            else:
                break
        return self._once_more(lacked)

    def _once_more(self, lacked: int) -> int:
        if self.refusal is not None and lacked and "nothing to repair" in str(self.refusal):
            # it was killed when all was done
            self.refusal = None
        if self.refusal is None:
            self._dies_at.clear()
            try:
                self._typed()
            except ConfigurationError:
                return lacked
            except WentBack:
                # a copy of the checkpoint does not know where the other one's repair has put the rows
                if not self._variant.repairs_on_copies:
                    self._world.readers.flag("REFUSED after a repair")
                return lacked
            self._world.readers.flag("LACKING after a repair")
        return lacked

    def _typed(self) -> Repair:
        left = [self._dies_at.pop(0)] if self._dies_at else []

        def step(name: str, apply: Any, *, reads: bool = False) -> Any:
            del name
            if not reads and left:
                left[0] -= 1
                if left[0] < 0:
                    left.clear()
                    raise Died
            return apply()

        sinks = {letter: kind(self._world, step) for letter, kind in self._kinds.items()}
        folders, spooled = self._copies[0]
        if self._variant.repairs_on_copies:
            self._copies.reverse()
        files, spool = MemoryFiles(folders, step), MemorySpool(self._world, step, spooled)
        place = _opened(files, spool, self._query)
        return self._variant.repair(place, configured(sinks))
