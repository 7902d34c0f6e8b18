"""Commit what is decided and abort what is not recorded, without the query."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError
from epochsink.identity import pipeline_name
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Identity, participants_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Take
    from epochsink.sink import Participant, Sink

_log = logging.getLogger("epochsink")


@dataclass(frozen=True, slots=True)
class Account:
    """What was done: the epochs committed, and those that stay recorded, oldest first."""

    committed: Sequence[int]
    pending: Sequence[int]


def recover(place: Place, sinks: Mapping[str, Sink]) -> Account:
    """Take the ledger, commit every decided epoch, and abort what no recorded epoch names.

    What is aborted is logged, a line each. Nothing is taken if a target is down. Raises what
    `epochsink.protocol.coordinator.Coordinator.recover` raises.
    """
    ledger = Ledger(place.files, uuid.uuid4().hex, purpose="epochsink recover")
    before = ledger.read()
    if before.owner is None:
        raise ConfigurationError(
            f"{place.location} has no ledger: there is nothing to recover and nothing of epochsink's to abort",
            hint="if epochsink ran on this checkpoint, restore its folder epochsink/ from the copy that the rest "
            "came from",
        )
    joined = {name: sink for name, sink in sinks.items() if name in before.owner.origins}
    for name in sinks.keys() - joined.keys():
        _log.info("sink '%s' has never been part of this query: nothing of it to look for", name)
    participants = participants_of(joined)
    try:
        refuse_unreachable(place, before.owner, participants)
        coordinator_of(place, ledger, participants).recover()
    finally:
        for participant in participants:
            participant.close()
    after = ledger.read()
    pending = [prepared.epoch for prepared in after.pending]
    return Account([prepared.epoch for prepared in before.pending if prepared.epoch in after.done], pending)


def refuse_unreachable(place: Place, owner: Take, participants: Sequence[Participant]) -> None:
    """Ask each target for its marker, which raises if it is down: before the take, which ends a driver that runs."""
    for participant in participants:
        open_for(place, participant, owner)
        for name in participant.members:
            participant.newest(name)


def open_for(place: Place, participant: Participant, take: Take) -> None:
    """Tell a participant who its sinks are in the generation of a take."""
    for name in participant.members:
        pipeline = pipeline_name(place.location)
        participant.open(Identity(place.query_id, name, take.generation, take.origins[name], pipeline))


def coordinator_of(place: Place, ledger: Ledger, participants: Sequence[Participant]) -> Coordinator:
    """Return what recovers a place's ledger by these participants."""
    return Coordinator(
        query_id=place.query_id,
        ledger=ledger,
        checkpoint=place.checkpoint,
        spool=place.spool,
        participants=participants,
        pipeline=pipeline_name(place.location),
        location=place.location,
    )
