"""What sinks have left in a target: prepared, staged or still at work."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from epochsink.errors import WentBack
from epochsink.sink.values import Committable, Recorded


class RemnantState(enum.Enum):
    """What becomes of a remnant by itself."""

    PREPARED = "it waits for a commit, which makes its rows visible"
    STAGED = "nothing: it holds rows that something else makes visible"
    RUNNING = "it may prepare something yet"


@dataclass(frozen=True, slots=True)
class Remnant:
    """Something that epochsink left in a target.

    ``generation`` is that of the driver that made it. ``key`` is that of its sink's identity, ``label`` is
    ``pipeline/sink``, ``since`` is in seconds since 1970 (None: unknown), ``owner`` is the target's user, ``holds``
    lists what it blocks, and ``in_use`` says whether its driver is connected now (None: unknown). ``stays`` says why it
    must not be ended; "" if it may be. ``of`` is the recorded part that it belongs to, ``handle`` what its kind of sink
    needs to end it.
    """

    kind: str
    name: str
    generation: int = 0
    key: str = ""
    label: str = ""
    epoch: int | None = None
    since: float | None = None
    owner: str = ""
    holds: tuple[str, ...] = ()
    in_use: bool | None = None
    stays: str = ""
    state: RemnantState = RemnantState.PREPARED
    of: Committable | None = field(default=None, compare=False)
    handle: object = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return kind and name."""
        return f"{self.kind} {self.name}"

    def to_json(self) -> dict[str, Any]:
        """Return what an operator is told: all but what only the engine and the kind of sink need."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_TOLD}


_NOT_TOLD: Final = {"state", "of", "handle"}


def orphans(remnants: Sequence[Remnant], generation: int, recorded: Recorded) -> list[Remnant]:
    """Return what no pending epoch names, up to a generation: what may be ended.

    Raises `WentBack` if a part of a done epoch is still prepared: it is never ended, as the target was set back.
    """
    pending, done = ({id(part) for part in parts} for parts in recorded)
    for each in remnants:
        if each.state is RemnantState.PREPARED and id(each.of) in done - pending:
            raise WentBack(
                f"{each} exists, but the ledger says that its epoch is done: the target has lost the commit, as after "
                "a failover to a copy that lacked it; its rows are not visible",
                hint=f"restore the newer state of the target; the {each.kind} is left as it is",
            )
    return [each for each in remnants if id(each.of) not in pending and each.generation <= generation]
