"""What operators type, in one step: their own commands die in tests of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from epochsink.cli.abandon import Abandonment
from epochsink.cli.accept import Acceptance
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import Ledger
from simulation.port_participant import PortParticipant
from simulation.steps import at_once
from simulation.storage import MemoryFiles, MemorySpool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from simulation.port import PortBase
    from simulation.world import World


def place_of(world: World, query: str) -> Any:
    """Return the checkpoint as a command opens it."""
    files, spool = MemoryFiles(world.files, at_once), MemorySpool(world, at_once)
    return SimpleNamespace(
        files=files, checkpoint=Checkpoint(files), query_id=query, spool=spool, location="checkpoint"
    )


def accept(world: World, query: str) -> int | None:
    """Type ``epochsink accept`` with the newest decided epoch, if the ledger lacks it; return that epoch."""
    place = place_of(world, query)
    newest: int = place.checkpoint.newest_decided()
    history = Ledger(place.files, "operator").read()
    if history.owner is None or history.newest >= newest:
        return None
    Acceptance(place, newest, None).carry_out()
    return newest


def abandon(world: World, kinds: Mapping[str, type[PortBase]], query: str) -> None:
    """Type ``epochsink abandon``."""
    ports = {letter: kind(world, at_once) for letter, kind in kinds.items()}

    def participant(members: Mapping[str, Any]) -> PortParticipant:
        return PortParticipant({name: ports[name] for name in members})

    sinks: Any = {
        letter: SimpleNamespace(commits_with=port.group, participant=participant) for letter, port in ports.items()
    }
    Abandonment(place_of(world, query), sinks=sinks, gone=[]).carry_out()
