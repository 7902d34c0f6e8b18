"""Ask the targets of a query what it has pending there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from epochsink.cli.console import told_of
from epochsink.identity import pipeline_name
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Identity, participants_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Take
    from epochsink.sink import Participant, Remnant, Sink


@dataclass(frozen=True, slots=True)
class InTarget:
    """What the sinks that commit as one have pending in their target, or the error with which it does not say."""

    sinks: Sequence[str]
    pending: Sequence[Remnant] = ()
    error: str = ""


def look_in_targets(place: Place, sinks: Mapping[str, Sink]) -> list[InTarget]:
    """Ask the targets of those sinks that have joined the ledger, all at once; changes nothing."""
    owner = Ledger(place.files, "").read().owner
    if owner is None:
        return []
    participants = participants_of({name: sink for name, sink in sinks.items() if name in owner.origins})
    with ThreadPoolExecutor(max(1, len(participants))) as pool:
        return list(pool.map(partial(_look, place, owner), participants))


def _look(place: Place, owner: Take, participant: Participant) -> InTarget:
    names = list(participant.members)
    with closing(participant):
        try:
            for name in names:
                label = pipeline_name(place.location)
                participant.open(Identity(place.query_id, name, owner.generation, owner.origins[name], label))
            return InTarget(names, participant.in_target())
        except Exception as failure:
            told = told_of(failure)
            if told is None:
                raise
            return InTarget(names, error=told["message"])
