"""What the specification's states are made of, and how a step changes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

STREAM: Final = (
    *("take", "compare", "sweep", "recover"),
    *("plan", "settle", "prepare", "vote", "record", "decide", "abandon", "undo", "ended"),
)
"""The steps of the stream thread: those of a start, and those of each epoch. All others are of the commit thread."""
SWEEPS: Final = ("sweep", "prepare", "undo")
FAILED: Final = ("failed", "unknown")
DEAD: Final = "dead"
"""In place of a step: the process has ended."""
ACCEPTED, LOSER = 0, -1


class Generation(int):
    """The number of a driver. Generations are only compared, so `take` numbers anew those that still occur."""


class Part(NamedTuple):
    """A prepared transaction: ``attempt`` has written its rows, ``generation`` has prepared this copy of them."""

    epoch: int
    attempt: Generation
    generation: Generation
    copy: int
    rows: str
    """The epoch's input: "a", or "b" if Spark planned the epoch anew, from other input."""


NONE: Final = Part(-1, Generation(0), Generation(0), ACCEPTED, "")
Mark = tuple[int, Generation] | None
"""The newest epoch that a target says is applied, and the attempt at it."""


class Ledger(NamedTuple):
    """All entries, summed up: the last `take`, the newest entry on each epoch, how many epochs are done."""

    owner: Generation = Generation(0)
    records: tuple[Part, ...] = ()
    done: int = 0

    @property
    def pending(self) -> tuple[Part, ...]:
        """What is recorded and not done."""
        return self.records[self.done :]

    @property
    def last_done(self) -> tuple[Part, ...]:
        """The last epoch that is done, if there is one."""
        return self.records[: self.done][-1:]

    def with_entry(self, kind: str, what: Any) -> Ledger:
        """Return the ledger with one more entry: an owner's take, an epoch that is done, a part that is recorded."""
        if kind == "take":
            return self._replace(owner=what)
        if kind == "done":
            return self._replace(done=what + 1)
        return self._replace(records=(*self.records[: what.epoch], what, *self.records[what.epoch + 1 :]))


class Transactions(NamedTuple):
    """A target that keeps prepared transactions. The mark is part of each of them."""

    prepared: frozenset[Part] = frozenset()
    visible: tuple[Part, ...] = ()

    @property
    def mark(self) -> Mark:
        """The mark of the last transaction that became visible."""
        return self.visible[-1][:2] if self.visible else None


class Documents(NamedTuple):
    """A target without transactions. Each epoch adds a document of its own, and replaces the one that all share."""

    own: tuple[tuple[int, Generation, str], ...] = ()
    shared: int = -1
    mark: Mark = None
    incarnation: int = 0


class Driver(NamedTuple):
    """A driver: the next steps of its two threads, and what it remembers."""

    stream: str = "take"
    commit: str = "idle"
    generation: Generation = Generation(0)
    known: Ledger = Ledger()
    epoch: int = 0
    """The epoch that Spark runs."""
    part: Part = NONE
    """What the commit thread commits, as it has read it in the ledger."""
    seen: tuple[Mark, int] | None = None
    """The mark and the incarnation of the documents when they were compared."""

    def at(self, step: str) -> Driver:
        """Return a driver with its stream or its commit thread at a step; it remembers what that step needs."""
        if step in STREAM:
            return self._replace(stream=step)
        part = NONE if step in ("idle", *FAILED) else self.part
        return self._replace(commit=step, part=part, seen=self.seen if step in ("write", "mark") else None)

    @property
    def again(self) -> Part:
        """What the commit thread commits, under the name that this driver gives it when it prepares it again."""
        is_own = self.part.generation == self.generation
        return self.part._replace(generation=self.generation, copy=1 + (is_own and self.part.copy))


Request = tuple[Any, ...]


class State(NamedTuple):
    """Everything that is stored anywhere; at the end what happened, for the invariants alone."""

    offsets: tuple[str, ...] = ()
    commits: int = 0
    ledger: Ledger = Ledger()
    spool: frozenset[tuple[int, Generation]] = frozenset()
    transactions: Transactions = Transactions()
    documents: Documents = Documents()
    drivers: tuple[Driver, ...] = ()
    """Those that live, in the order of their starts: nothing else depends on which is which."""
    late: frozenset[Request] = frozenset()
    """Requests whose reply is lost, and which may still be applied."""
    stopped: str = ""
    """Why the query waits for an operator, if it does."""
    ever: frozenset[tuple[int, str]] = frozenset()
    """Each epoch that was ever decided, with its input."""
    restored: bool = False
    """Whether checkpoint or ledger were put back."""
    lost: frozenset[tuple[str, int]] = frozenset()
    """The epochs that targets have lost because they were set back."""
    harm: str = ""

    def put(self, d: Driver, changed: Driver | None) -> State:
        """Return a state in which a driver has changed, or its process has ended."""
        at = self.drivers.index(d)
        return self._replace(drivers=(*self.drivers[:at], *([changed] if changed else []), *self.drivers[at + 1 :]))

    def begun(self) -> State:
        """Return a state with one more driver. Spark runs the last planned epoch again, unless its commit exists."""
        return self._replace(
            drivers=(*self.drivers, Driver(epoch=len(self.offsets) - (self.commits < len(self.offsets))))
        )

    def under_way(self, request: Request) -> State:
        """Return a state in which a request may still be applied."""
        return self._replace(late=self.late | {request})

    def with_prepared(self, prepared: frozenset[Part], visible: tuple[Part, ...] | None = None) -> State:
        """Return a state in which a target's transactions have changed."""
        shown = self.transactions.visible if visible is None else visible
        return self._replace(transactions=Transactions(prepared, shown))

    def part_of(self, d: Driver) -> Part:
        """Return what the accepted tasks of a driver's attempt prepare."""
        return Part(d.epoch, d.generation, d.generation, ACCEPTED, self.offsets[d.epoch])


class Move(NamedTuple):
    """A step, or a fault of this kind, and the state after it."""

    name: str
    to: State
    fault: str = ""


Moves = Iterator[Move]


def step(name: str, s: State, d: Driver, to: str, fault: str = "", **more: Any) -> Move:
    """Return a step after which one thread of a driver is at ``to``, and ``more`` of the driver has changed."""
    return Move(name, s.put(d, None if to == DEAD else d.at(to)._replace(**more)), fault)


def generations(value: object) -> set[Generation]:
    """Return the generations that occur in a value."""
    if isinstance(value, Generation):
        return {value}
    return {one for part in value for one in generations(part)} if isinstance(value, tuple | frozenset) else set()


def renumbered(s: State) -> State:
    """Return a state with its generations numbered 0, 1, 2 ..., in the same order."""
    numbers = {old: Generation(new) for new, old in enumerate(sorted(generations(s) | {Generation(0)}))}

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple | frozenset):
            parts = map(renamed, value)
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return numbers[value] if isinstance(value, Generation) else value

    return renamed(s)  # type: ignore[no-any-return]
