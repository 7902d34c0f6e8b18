"""Ask the targets of a query what they have pending, and whether their markers agree with the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.console import explanation_of
from epochsink.cli.driver_process import has_ended
from epochsink.errors import Addresses, WentBack, naming
from epochsink.protocol.consistency import compare, mention_repair
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Take
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.retained import Retention
from epochsink.sink import Participant, Remnant, Sink, participants_of

_TURNS: Final = 3
"""How often a target is compared while the query runs and they disagree."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How a target's markers and the ledger disagree, what to do, and the command that mends it, "" if none does."""

    message: str
    hint: str
    command: str


@dataclass(frozen=True, slots=True)
class InTarget:
    """What the sinks that commit as one have pending in their target, or the error that prevents an answer.

    ``disagreements`` say what stops the next start: the target was set back, or is another one.
    """

    sinks: Sequence[str]
    pending: Sequence[Remnant] = ()
    error: str = ""
    disagreements: Sequence[Disagreement] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what an operator is told."""
        return asdict(replace(self, pending=())) | {"pending": [each.to_json() for each in self.pending]}


def look_in_targets(place: QueryCheckpoint, sinks: Mapping[str, Sink], addresses: Addresses) -> list[InTarget]:
    """Ask the targets of those sinks that have joined the ledger, all at once; changes nothing.

    ``addresses`` completes the commands of disagreements.
    """
    owner = Ledger(place.files, "").read().owner
    if owner is None:
        return []
    participants = participants_of({name: sink for name, sink in sinks.items() if name in owner.origins})
    with ThreadPoolExecutor(max(1, len(participants))) as pool:
        return list(pool.map(partial(_look, place, owner, addresses), participants))


def _look(place: QueryCheckpoint, owner: Take, addresses: Addresses, participant: Participant) -> InTarget:
    names = list(participant.members)
    with closing(participant):
        try:
            place.open(participant, owner)
            pending = [_with_driver(owner, remnant) for remnant in participant.operator().pending()]
            disagreements = [_compared(place, participant, name, addresses) for name in names]
            return InTarget(names, pending, disagreements=[each for each in disagreements if each is not None])
        except Exception as failure:
            reason = explanation_of(failure)
            if reason is None:
                raise
            return InTarget(names, error=reason["message"])


def _with_driver(owner: Take, remnant: Remnant) -> Remnant:
    """Return a remnant of whose driver the ledger says the process: a server may hold a session of one that died."""
    ended = remnant.generation == owner.generation and owner.stamp is not None and has_ended(owner.stamp)
    return replace(remnant, in_use=False) if ended else remnant


def _compared(place: QueryCheckpoint, participant: Participant, name: str, addresses: Addresses) -> Disagreement | None:
    """Compare one sink's markers with the ledger, as a start does; changes nothing."""
    ledger = Ledger(place.files, "")
    history = ledger.read()
    for _ in range(_TURNS):
        try:
            with naming(name):
                compare(participant, history, name)
        except WentBack as disagreement:
            before, history = history, ledger.read()
            # the ledger after the target: if it has changed, the query has written meanwhile
            if standing(before, name) == standing(history, name):
                mention_repair(disagreement, participant, Retention(place.spool, place.query_id))
                disagreement.address(addresses)
                return Disagreement(disagreement.message, disagreement.hint, disagreement.command)
        else:
            return None
    return None


def standing(history: LedgerHistory, name: str) -> object:
    """Return what a sink's target is compared with."""
    return history.applied.get(name), history.pending_of(name)
