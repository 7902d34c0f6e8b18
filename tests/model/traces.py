"""Whether what a history shows is what the specification allows.

A history is a sequence of observations: an entry in the ledger, a decision, a target's answer, a fault. Most steps of
the specification are not observed, and of what a driver does in itself nothing is. So the set of all states in which
the specification may be is kept: those that are reached by steps that nobody observes are added, and an observation
leaves those that agree with it. If none is left, the history is not one of the specification, and `Refused` shows both
sides: what was observed, and what the specification would have allowed instead.

Requests to a target are observed as calls: while a driver is inside one, the step may happen, and at no other time; its
answer says whether it has happened. The sets and what follows them are kept, as most histories begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from model.specification import Protocol
from model.state import FAILED, LOSER, NONE, Documents, Driver, Generation, Ledger, Move, Moves, Part, State

OBSERVED: Final = frozenset({"take", "append", "plan", "decide", "stop", "end", "start fails", "vote fails"})
"""The steps that happen when they are observed, and at no other time."""
STARTS: Final = ("take", "compare", "sweep", "recover", "plan")
LONGEST: Final = 10**6
EVENTS_SHOWN, PARTS_SHOWN = 12, 4
TAKE: Final = ("append", "take")
"""A late one: what is observed says which generation it gets."""
Event = tuple[Any, ...]
"""What is observed (a method of `Possible`), and the details."""
Gates = frozenset[tuple[int, str]]


class Refused(AssertionError):
    """The specification does not allow what was observed, an ``event``."""

    def __init__(self, event: Event, why: str) -> None:
        super().__init__(why)
        self.event = event


COMMITTED: Final = ("compare_documents", "write", "mark", "done")
"""Where a commit is once its transactions are visible."""


class Observed(Protocol):
    """The specification, for a history of any length."""

    observed = OBSERVED

    def __init__(self, lacks: str = "") -> None:
        super().__init__(lacks, epochs=LONGEST)

    def take(self, s: State, d: Driver) -> Moves:
        """Do nothing unless it is refused: what is observed says which generation it gets."""
        if s.commits and s.ledger == Ledger():
            yield from super().take(s, d)

    def plan(self, s: State, d: Driver) -> Moves:
        """Wait until Spark has read its logs; and let the source end at any epoch."""
        if d.epoch >= 0:
            yield from super().plan(s, d)
            yield Move("no more input", s.put(d, d._replace(stream="ended")))

    def looked(self, s: State, d: Driver) -> Moves:
        """Append `done`: the marks were read before a target was set back."""
        yield from Protocol(lacks="both marks").done(s, d)


class Stored(Observed):
    """The specification, for what a history has left in its checkpoint: what Spark does there, nobody has observed."""

    observed = OBSERVED - {"plan", "decide"}

    def plan(self, s: State, d: Driver) -> Moves:
        """Let Spark read its logs first."""
        if d.epoch < 0:
            yield Move("read the logs", s.put(d, d._replace(epoch=len(s.offsets) - (s.commits < len(s.offsets)))))
        else:
            yield from super().plan(s, d)


class Possible(NamedTuple):
    """The states in which the specification may be, what each driver is inside of, and each driver's generation.

    ``transactions`` and ``documents``: whether the history has such a target; one that it lacks is not observed.
    """

    protocol: Observed
    states: frozenset[State]
    transactions: bool
    documents: bool
    gates: Gates = frozenset()
    generations: tuple[Generation, ...] = ()
    over: bool = False
    """Whether the query has stopped for its operator."""
    is_set_back: bool = False
    """Whether a target was set back, perhaps to before the query joined: of that the specification knows nothing."""
    looked: frozenset[tuple[int, int]] = frozenset()
    """Drivers, and epochs whose transactions they had committed and looked at when a target was set back."""
    others_lost: bool = False
    """Whether a target was set back whose epochs have other transactions than the one that is followed."""

    # ---- steps that nobody observes

    def closed(self) -> Possible:
        """Return the same with every state that steps reach which nobody observes."""
        reached, live = set(self.states), list(self.states)
        while live:
            for state in self._next(live.pop()):
                if state not in reached:
                    reached.add(state)
                    live.append(state)
        return self._replace(states=frozenset(reached))

    def _next(self, s: State) -> Iterator[State]:
        for number, d in self._drivers(s):
            for move in self.protocol.steps(s, d):
                if move.name not in self.protocol.observed and not move.fault and self._may(move.name, number, d):
                    yield move.to
            if d.commit == "done" and (number, d.part.epoch) in self.looked:
                yield s.put(d, d._replace(commit="looked"))
        if any(call == "unblock" for _, call in self.gates):
            for part in s.transactions.prepared.difference(s.ledger.records):
                yield s.with_prepared(s.transactions.prepared - {part})
        for request in s.late:
            if request[0] not in self.protocol.observed:
                yield self.protocol.apply(s._replace(late=s.late - {request}), request)[0]

    def _may(self, step: str, number: int, d: Driver) -> bool:
        """Return whether a driver may take a step now."""
        if step in ("commit", "abort") and not self.transactions:
            return True
        if step in ("write", "mark"):
            return not self.documents or (number, "commit documents") in self.gates
        if step == "prepare":
            kind = "prepare again" if d.commit == "prepare_again" else "write"
            return not self.transactions or (number, kind) in self.gates
        if step == "commit" and d.commit != "commit":
            return (number, "compare") in self.gates
        kinds = {"commit": "commit transactions", "abort": "sweep"}
        return step not in kinds or (number, kinds[step]) in self.gates

    def _drivers(self, s: State) -> Iterator[tuple[int, Driver]]:
        for d in s.drivers:
            yield self.generations.index(d.generation), d

    def _each(self, number: int, then: Callable[[State, Driver], Iterable[State]]) -> Possible:
        """Return what becomes of each state in which a driver lives."""
        own = [(s, d) for s in self.states for at, d in self._drivers(s) if at == number]
        return self._replace(states=frozenset(after for s, d in own for after in then(s, d)))

    # ---- what a driver does

    def starts(self, number: int) -> Possible:
        """Start a driver."""
        new = Generation(-1 - number)

        def started(s: State) -> State:
            *others, d = s.begun().drivers
            return s._replace(drivers=(*others, d._replace(generation=new, epoch=-1)))

        return self._replace(states=frozenset(map(started, self.states)), generations=(*self.generations, new))

    def reads(self, number: int, epoch: int) -> Possible:
        """Let Spark, which has read its logs, run the newest epoch that it has planned, or the next one."""

        def runs(s: State, d: Driver) -> Iterator[State]:
            if epoch == len(s.offsets) - (s.commits < len(s.offsets)):
                yield s.put(d, d._replace(epoch=epoch))

        return self._each(number, runs)

    def enters(self, number: int, call: str) -> Possible:
        """Let a driver call a target."""
        return self._replace(gates=self.gates | {(number, call)})

    def leaves(self, number: int, call: str) -> Possible:
        """End the call."""
        return self._replace(gates=self.gates - {(number, call)})

    def committed(self, number: int, epoch: int, generation: int) -> Possible:
        """Hear from the target that an attempt is committed; it may have been set back since."""

        def is_so(s: State) -> bool:
            heard = {d.part[:2] for at, d in self._drivers(s) if at == number and d.commit not in ("commit", "ask")}
            return (epoch, generation) in {part[:2] for part in s.transactions.visible} | heard

        return self._replace(states=frozenset(filter(is_so, self.states)))

    def gone(self, _: int, epoch: int) -> Possible:
        """Hear from it that what the ledger names is neither prepared nor committed."""

        def is_gone(s: State) -> bool:
            part = s.ledger.records[epoch]
            return part not in s.transactions.prepared and part[:2] not in {one[:2] for one in s.transactions.visible}

        return self._replace(states=frozenset(filter(is_gone, self.states)))

    def written(self, number: int, epoch: int, generation: int) -> Possible:
        """Hear from the target of documents that an attempt is written, and marked; it may have been set back since."""

        def is_so(s: State) -> bool:
            heard = [d.part[:2] for at, d in self._drivers(s) if at == number and d.commit in ("done", "looked")]
            return (epoch, generation) in [s.documents.mark, *heard]

        return self._replace(states=frozenset(filter(is_so, self.states)))

    def abandons(self, number: int) -> Possible:
        """Let an attempt fail that is not recorded."""

        def abandoned(s: State, d: Driver) -> Iterator[State]:
            yield s.put(d, d._replace(stream="abandon")) if d.stream in ("prepare", "vote", "record") else s

        return self._each(number, abandoned)

    def stream_ends(self, number: int) -> Possible:
        """End the stream thread, for whatever reason."""
        return self._each(number, lambda s, d: [s.put(d, d._replace(stream="ended"))])

    def commits_fail(self, number: int) -> Possible:
        """End the commit thread early, for whatever reason."""

        def ended(s: State, d: Driver) -> Iterator[State]:
            again = d.commit in ("prepare_again", "record_again")
            yield s if d.commit in FAILED else s.put(d, d.at("unknown" if again else "failed"))

        return self._each(number, ended)

    def stops(self, number: int) -> Possible:
        """Let a driver stop the query until an operator comes."""

        def stopped(s: State, d: Driver) -> Iterator[State]:
            yield from (move.to for move in self.protocol.steps(s, d) if move.name == "stop")
            # the commit thread, which is idle, sees it too
            if s.transactions.prepared.intersection(s.ledger.records[: s.ledger.done]):
                yield s
            if self.is_set_back and not (s.transactions.visible and s.documents.own):
                yield s
            # the vote compares marks in its own transaction, and so does the sweep after a failed attempt
            if any(self.protocol.disagreement(mark, s.ledger) for mark in (s.transactions.mark, s.documents.mark)):
                yield s
            # PostgreSQL's mark names the copy as well, of which an older ledger may have no record
            if s.restored and any(part not in s.ledger.records for part in s.transactions.visible[-1:]):
                yield s

        # it may be for another transaction
        return (self if self.others_lost else self._each(number, stopped))._replace(over=True)

    def dies(self, number: int) -> Possible:
        """End a driver's process."""
        dead = self._each(number, lambda s, d: [s.put(d, None)])
        return dead._replace(gates=frozenset(gate for gate in self.gates if gate[0] != number))

    # ---- what the files of a checkpoint tell afterwards

    def superseded(self, number: int) -> Possible:
        """Let another driver take the ledger next: of this one, Spark may still decide the epoch that it runs."""

        def left(s: State, d: Driver) -> Iterator[State]:
            late = s.late | {("decide", d.epoch)} if d.stream == "decide" else s.late
            yield s._replace(late=late).put(d, None)

        return self._each(number, left)

    def decided_within(self, fewest: int, most: int) -> Possible:
        """Know how many epochs are decided, at least and at most."""
        return self._replace(states=frozenset(s for s in self.states if fewest <= s.commits <= most))

    def may_be_lost(self) -> Possible:
        """Let a recorded transaction be aborted, or not."""
        lost = {
            s.with_prepared(s.transactions.prepared - {part})
            for s in self.states
            for part in s.transactions.prepared.intersection(s.ledger.records)
        }
        return self._replace(states=self.states | lost)

    def entry_is(self, number: int, ledger: Ledger, fewest: int, most: int) -> Possible:
        """Append an entry, when so many epochs are decided."""
        return self.decided_within(fewest, most).ledger_is(number, ledger)

    # ---- what is stored

    def ledger_is(self, number: int, ledger: Ledger) -> Possible:
        """Append an entry: a driver does it now, or has sent it long ago."""

        def appended(s: State) -> Iterator[State]:
            for at, d in self._drivers(s):
                if at == number and ledger.owner != s.ledger.owner:
                    # of two that take a new ledger at once, the first may have to take it again
                    yield from [self.protocol.taken(s, d, ledger.owner).to] if d.stream in STARTS else []
                elif at == number:
                    yield from (move.to for move in self.protocol.steps(s, d) if move.name == "append")
            for request in s.late:
                if request == TAKE:
                    own = [d for at, d in self._drivers(s) if at == number]
                    sent = s.put(own[0], own[0]._replace(generation=ledger.owner)) if own else s
                    yield self.protocol.apply(sent, (*TAKE, ledger.owner))[0]
                elif request[0] == "append":
                    yield self.protocol.apply(s._replace(late=s.late - {request}), request)[0]

        states = frozenset(to for s in self.states for to in appended(s) if to.ledger == ledger)
        generations = list(self.generations)
        if ledger.owner not in generations:
            generations[number] = ledger.owner
        return self._replace(states=states, generations=tuple(generations))

    def offsets_are(self, number: int, offsets: tuple[str, ...]) -> Possible:
        """Let Spark plan an epoch: before the start, in a query that recovers in its first batch; or very late."""
        if all(number != at or d.stream == "ended" for s in self.states for at, d in self._drivers(s)):
            return self._replace(states=frozenset(s._replace(offsets=offsets) for s in self.states))

        def planned(s: State, d: Driver) -> Iterator[State]:
            settle = d._replace(stream="settle") if d.stream == "plan" else d
            if d.stream in ("take", "plan"):
                yield s._replace(offsets=offsets).put(d, settle)

        return self._each(number, planned)

    def commits_are(self, commits: int) -> Possible:
        """Let Spark decide an epoch."""

        def decided(s: State) -> Iterator[State]:
            yield from (move.to for d in s.drivers for move in self.protocol.steps(s, d) if move.name == "decide")
            for request in s.late:
                if request[0] == "decide":
                    yield self.protocol.apply(s._replace(late=s.late - {request}), request)[0]

        return self._replace(states=frozenset(to for s in self.states for to in decided(s) if to.commits == commits))

    # ---- faults

    def unanswered(self, number: int) -> Possible:
        """Lose a request of a driver, or its reply, or deliver it late, or twice."""

        def lost(s: State, d: Driver) -> Iterator[State]:
            yield s
            if d.stream == "take":
                yield s._replace(late=s.late | {TAKE})
            # a producer that begins, late or twice, aborts what its transactional id had open
            running = [s.part_of(d)] if 0 <= d.epoch < len(s.offsets) else []
            for part in [*running, *([d.again] if d.part != NONE else [])]:
                yield s._replace(late=s.late | {("abort", part)})
            for move in self.protocol.steps(s, d):
                step, _, reply = move.name.partition(": ")
                if reply and self._may(step, number, d):
                    yield move.to
                    # the client may ask again, and be answered
                    yield s._replace(late=move.to.late)

        return self._each(number, lost)

    def times_out(self) -> Possible:
        """Abort whatever is prepared."""
        return self._replace(states=frozenset(s.with_prepared(frozenset()) for s in self.states))

    def loses_a_task(self, number: int) -> Possible:
        """Let a task prepare that is not accepted: the transaction of one that was may be aborted by that."""

        def prepared(s: State, d: Driver) -> Iterator[State]:
            before = s.transactions.prepared
            for held in (before, *(before - {part} for part in before)):
                yield s.with_prepared(held)
                for epoch in range(min(d.epoch + 1, len(s.offsets))):
                    loser = s.part_of(d._replace(epoch=epoch))._replace(copy=LOSER)
                    yield s.with_prepared(held | {loser})

        return self._each(number, prepared)

    def restored(self, offsets: tuple[str, ...], commits: int, ledger: Ledger) -> Possible:
        """Put older copies back, now that everything has stopped."""

        def after(s: State) -> State:
            late = frozenset(request for request in s.late if request[0] not in ("append", "decide"))
            s = s._replace(offsets=offsets, commits=commits, ledger=ledger, late=late, restored=True)
            if self.transactions:
                return s
            # one that the history lacks must not be ahead of the ledger when its documents are not
            return s.with_prepared(frozenset(ledger.pending), ledger.records[: ledger.done])

        return self._replace(states=frozenset(map(after, self.states)))

    def begins_anew(self) -> Possible:
        """Begin a new checkpoint on the same targets, which know nothing of it."""
        return self._replace(
            states=frozenset([State()]),
            gates=frozenset(),
            over=False,
            is_set_back=False,
            looked=frozenset(),
            others_lost=False,
        )

    def transactions_are_set_back(self, of_each: int) -> Possible:
        """Put an older copy of them back, or lose the newest: any of those that the ledger names may be prepared.

        ``of_each`` is how many an epoch has.
        """

        def older(s: State) -> Iterator[State]:
            prepared, visible = s.transactions
            for newest in range(len(visible) + 1):
                named = set(s.ledger.records[newest:]) - prepared
                for more in [set[Part](), *({part} for part in named), named]:
                    for held in {prepared, prepared - set(s.ledger.records), frozenset[Part]()}:
                        yield s.with_prepared(frozenset(held | more), visible[:newest])

        return self._set_back(older)._replace(others_lost=of_each > 1)

    def documents_are_set_back(self) -> Possible:
        """Put an older copy of the index back, or lose the newest requests: the mark is the last of an epoch."""

        def older(s: State) -> Iterator[State]:
            own, incarnation = s.documents.own, s.documents.incarnation + 1
            for newest in range(-1, len(own)):
                marks = {None if at < 0 else own[at][:2] for at in (newest, max(newest - 1, -1))}
                for mark in marks:
                    yield s._replace(documents=Documents(own[: newest + 1], newest, mark, incarnation))

        return self._set_back(older)

    def _set_back(self, older: Callable[[State], Iterable[State]]) -> Possible:
        states = frozenset(to for s in self.states for to in older(s))
        looked = {(number, d.part.epoch) for s in states for number, d in self._drivers(s) if d.commit in COMMITTED}
        return self._replace(states=states, looked=self.looked | looked, is_set_back=True)

    # ---- what to show

    def expected(self) -> list[str]:
        """Return what the specification allows next, of what is observed."""
        found = set()
        for s in self.states:
            for number, d in self._drivers(s):
                where = f"driver {number}, {d.stream} of {d.epoch}, {d.commit}"
                found.add(f"{where}: " + ", ".join(move.name for move in self.protocol.steps(s, d)))
        return sorted(found)


class Traces:
    """Replays histories against the specification. ``replayed`` counts them, ``observations`` what they showed."""

    def __init__(self, protocol: Observed | None = None) -> None:
        self._protocol = protocol or Observed()
        self._without = Observed(lacks="finished")
        self._nodes: list[Possible] = []
        self._numbers: dict[Possible, int] = {}
        self._after: dict[tuple[int, Event], int] = {}
        self.replayed = self.observations = 0

    def replay(self, events: Iterable[Event], *, transactions: bool, documents: bool, finishes: bool = True) -> None:
        """Replay one history; ``finishes``: whether its target repeats a commit that it has lost. Raises `Refused`."""
        protocol = self._protocol if finishes else self._without
        at = self._number(Possible(protocol, frozenset([State()]), transactions, documents))
        shown: list[Event] = []
        self.replayed += 1
        for event in events:
            self.observations += 1
            shown.append(event)
            at = self._step(at, event, shown)

    def _step(self, at: int, event: Event, shown: list[Event]) -> int:
        after = self._after.get((at, event))
        if after is None:
            before = self._nodes[at]
            name, *details = event
            possible = before if before.over else getattr(before, name)(*details)
            if not possible.states:
                raise Refused(event, _refusal(before, shown))
            after = self._after[at, event] = self._number(possible.closed())
        return after

    def _number(self, possible: Possible) -> int:
        number = self._numbers.setdefault(possible, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(possible)
        return number

    def forget(self) -> None:
        """Forget what was kept of the histories so far."""
        self._nodes, self._numbers, self._after = [], {}, {}

    def __str__(self) -> str:
        """Return what was replayed."""
        return f"{self.replayed:,} histories replayed, {self.observations:,} observations"


def _refusal(before: Possible, shown: list[Event]) -> str:
    events = [" ".join([name, *map(_short, details)]) for name, *details in shown[-EVENTS_SHOWN:]]
    stored = {_short(s._replace(drivers=())) for s in before.states}
    return "\n  ".join(
        [
            f"observed, the last of {len(shown)}:",
            *events,
            "^ not allowed\nallowed by the specification:",
            *before.expected(),
            "in the states:",
            *sorted(stored),
        ]
    )


def _short(value: Any) -> str:
    """Return a value as Python writes it, with the last parts alone of what has many."""
    if not isinstance(value, tuple | frozenset):
        return repr(value)
    names = [f"{name}=" for name in getattr(value, "_fields", ())]
    parts = [*map(_short, value)]
    if names:
        return f"{type(value).__name__}({', '.join(map(''.join, zip(names, parts, strict=True)))})"
    if isinstance(value, frozenset):
        parts.sort()
    return f"({', '.join(['...'] * (len(parts) > PARTS_SHOWN) + parts[-PARTS_SHOWN:])})"
