"""What all ports share. A port is a sink over an in-memory target: the real committers' decisions, request by request.

A port is the driver's side of one sink, and also the maker of its tasks' writers: `begin` stands for `Sink.writer`.
Rows are `Row` tuples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from epochsink.identity import identity_key
from epochsink.sink import Epoch, Identity, Outcome, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from epochsink.sink import Ballot, Committable, LastDone, Recorded
    from simulation.readers import Row
    from simulation.steps import Stepper
    from simulation.world import World

Answer = TypeVar("Answer")

ANY_GENERATION = 10**12
ABORTED = Outcome.ABORTED
UNKNOWN = Outcome.UNKNOWN


def read_rows(rows: Rows) -> list[Row]:
    """Return all spooled rows of an epoch in the order of the accepted tasks."""
    found: list[Any] = [row for task in rows.tasks() for row in rows.read(task)]
    return found


def twice(request: Callable[[], Answer]) -> Answer:
    """Make a request that is right to repeat, once more if its outcome is unknown."""
    try:
        return request()
    except OSError:
        return request()


class TaskWriter(Protocol):
    """One task attempt's side of a sink."""

    def write(self, rows: list[Row]) -> None: ...
    def prepare(self) -> Committable: ...


class PortBase:
    """What all ports share."""

    letter = "?"
    repairs = False
    group: str | None = None
    """Equal for ports that commit as one."""

    def prepared_with(self, epoch: Epoch) -> dict[str, int]:
        """Return the options that a later commit of this epoch needs: they go into its committables."""
        self._world.write_with(epoch.attempt, self.options)
        return {"options": self.options}

    def options_of(self, part: Committable) -> int:
        """Return the options under which a part is to be applied: those that it was prepared with."""
        found: int = part["options"]
        return found

    def apply_with(self, epoch: Epoch, part: Committable) -> None:
        """Apply a part under its options."""
        self._world.apply_with(self.letter, epoch.attempt, self.options_of(part))

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None:
        self._world = world
        self._step = world.copying(self.letter, step)
        self._spool = spool
        self.options = world.options
        self._key = ""
        self._identity = Identity("", "")
        self.require_ours: Callable[[], object] = lambda: None

    @property
    def key(self) -> str:
        """Return by which key the target knows this sink."""
        return self._key

    def initial_state(self) -> dict[str, Any]:
        """Fix nothing."""
        return {}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is."""
        self._identity = identity
        self._key = identity_key(identity)

    def fence(self) -> None:
        """Shut nobody out: what this target commits, it commits on a condition."""

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Whether the marker of a part of a done epoch is missing."""
        del part
        newest: int | None = self.newest()  # type: ignore[attr-defined] # each port has it
        return newest is None or newest < done.epoch

    def leftovers(self) -> list[str]:
        """Find nothing."""
        return []

    def newest_generation(self) -> int:
        """Return the highest generation of what the target holds: a look without a step, as it changes nothing."""
        return max(self.generations(), default=0)

    def generations(self) -> Iterable[int]:
        """Return the generations of what the target holds."""
        return ()

    def unblock(self, parts: Sequence[Committable], recorded: Callable[[], Recorded]) -> list[str]:
        """Do nothing: no reader waits for what others have prepared."""
        del parts, recorded
        return []

    def replay_of(self, epoch: Epoch, part: Committable, ballot: Ballot, attempt: str) -> Committable:
        """Prepare a part of a ballot again."""
        replayed: Committable = self.replay(epoch, part, ballot.rows, attempt, ballot.after)  # type: ignore[attr-defined] # each port has it
        return replayed

    def await_visible(self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None) -> None:
        """Do nothing: what is committed is visible."""

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Leave nothing."""

    def commit_at_once(
        self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None
    ) -> Collection[int]:
        """Commit nothing side by side."""
        return ()
