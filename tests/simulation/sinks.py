"""The sinks of the simulation by their letters, each the production's over a server in memory.

K Kafka; P and S PostgreSQL prepared and staged, A and B, C and D likewise two PostgreSQL sinks of one database, T one
whose tasks prepare each for itself; E and F Elasticsearch without keys and with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from epochsink.sink import Participant, Task
from simulation import postgres_sink
from simulation.kafka_sink import KafkaSink
from simulation.search_sink import KeyedSearchSink, SearchSink
from simulation.steps import Stepper
from simulation.world import World


class SimulatedSink(Protocol):
    """One sink of one driver or command. Those of equal ``group`` commit as one."""

    letter: str
    group: str | None

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None: ...

    def participant(self, members: Mapping[str, Any]) -> Participant:
        """Return the production's participant of the sinks that commit as one."""

    def begin(self, task: Task, attempt_number: int = 0) -> Any:
        """Return a task's writer."""


_KINDS: tuple[type[SimulatedSink], ...] = (KafkaSink, *postgres_sink.KINDS, SearchSink, KeyedSearchSink)
KINDS: Mapping[str, type[SimulatedSink]] = {kind.letter: kind for kind in _KINDS}


def participants(sinks: Mapping[str, SimulatedSink]) -> list[Participant]:
    """Return the participants of some sinks."""
    groups: dict[str, dict[str, SimulatedSink]] = {}
    for letter, sink in sinks.items():
        groups.setdefault(sink.group or letter, {})[letter] = sink
    return [participant_of(members) for members in groups.values()]


def participant_of(members: Mapping[str, SimulatedSink]) -> Participant:
    """Return the participant of sinks that commit as one."""
    return next(iter(members.values())).participant(members)
