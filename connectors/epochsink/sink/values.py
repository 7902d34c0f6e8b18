"""Who and what: identities, epochs, tasks, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Committable = dict[str, Any]
"""A JSON object that names something prepared. Never holds a secret: it is written to the ledger."""
Committables = Sequence[Committable]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a sink is to its target: the query id of the checkpoint, and the sink's name in the query.

    ``origin`` is what the participant fixed when this sink first joined the ledger (see
    `Participant.initial_state`); it never changes afterwards. ``generation`` is the number of this
    driver's `take` of the ledger, larger than that of every driver before it. ``pipeline`` is a name for people
    (the checkpoint folder's), which decides nothing: it may change between runs.
    """

    query_id: str
    sink: str
    generation: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str = ""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One attempt at one micro-batch.

    ``number`` is Spark's batch id, ``attempt`` a fresh uuid (32 hex) for each call of ``foreachBatch``, so
    that two attempts at one epoch never share a name.
    """

    number: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Task:
    """One invocation of one Spark task.

    ``partition`` is the partition's index, ``uuid`` (32 hex) is fresh for every invocation, because (stage,
    partition, attempt number) is not unique in Spark. ``spooled`` says whether its rows go into the spool too, and
    ``from_spool`` that the vote can take them from there (`epochsink.sink.Keeping`). Up to ``carried``
    bytes of the spool are no file, but go to the driver with the task's answer.
    """

    identity: Identity
    epoch: Epoch
    partition: int
    uuid: str
    spooled: bool = True
    from_spool: bool = False
    carried: int = 0


@dataclass(frozen=True, slots=True)
class LastDone:
    """The newest epoch with rows that the ledger calls done in a sink: what its target must hold.

    ``attempt`` and ``parts`` are those that were recorded, so that another writer's epoch of the same number is told
    apart. Without parts it is an operator's word: the target may hold anything up to this epoch.
    """

    epoch: int
    attempt: str
    parts: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """What one task's file in the spool of one sink held when it was closed: recorded, and compared at each read.

    ``carried`` is the file itself, in base64, if it was so small that the record carries it: then it is in no spool.
    """

    rows: int
    size: int
    crc32: int
    carried: str = field(default="", repr=False)


Written = Mapping[str, Sequence[tuple[str, Committable]]]
"""For each sink with rows, the (task uuid, committable) of every task that Spark accepted, by partition."""
Spooled = Mapping[str, Mapping[str, SpoolFile]]
"""What the accepted tasks of an epoch have spooled: by sink, and by the task's uuid."""
NOTHING_SPOOLED: Spooled = MappingProxyType({})
