"""The protocol stated once more, without a line of the library: what is stored, the steps, the faults, the invariants.

Spark runs epochs 0, 1, 2 of one query into two targets. One keeps prepared transactions, as PostgreSQL and Kafka do.
The other has none and is written from the spool, as Elasticsearch is. A state is a value. A step is one method: it
reads, then changes one place that others can see. Between two steps of a thread, all other threads may take any number
of theirs, so a pause of any length is no fault of its own. A request whose reply is lost is applied after any later
step, or never: this one fault stands for an error, a lost reply and a late delivery.

The protocol rests on RULES. If one of them is taken away (``Protocol(lacks=...)``), `exploration` finds a state that
`violation` names, or one from which no step leads to a good end.

Not in here: two copies of a checkpoint that both run, a new checkpoint on an old target, letters, repair, sinks that
join or leave, the tasks of an epoch one by one. tests/simulation plays these on the code itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

EPOCHS: Final = 3
RULES: Final = {
    "decided": "an epoch is committed only after Spark has decided it",
    "owned": "only the last driver that took the ledger appends to it",
    "number": "an entry is created if its number is free, and never overwritten",
    "adopted": "a recorded epoch that runs again is not written again",
    "spared": "a start ends nothing that is recorded, decided or not",
    "evidence": "what a target holds prepared of a done epoch shows that it was set back, and is not ended",
    "older": "a sweep ends nothing of a later generation",
    "alone": "no sweep runs while an epoch is prepared again",
    "unknown append": "if the outcome of an append is unknown, nothing of the attempt is ended",
    "unknown replay": "nor is what was prepared again",
    "accepted": "only what the accepted tasks have prepared is committed",
    "gone is not done": "a prepared transaction that is gone may be aborted: the mark tells",
    "gone is not aborted": "and it may be committed: the mark tells",
    "replay recorded": "what is prepared again is recorded before it is committed",
    "rows kept": "the spool keeps the rows until the epoch is done",
    "same id": "a document has the same id each time that its epoch is written",
    "version": "an older epoch does not replace a newer document",
    "input": "a recorded epoch has the input that the checkpoint has for it",
    "ledger behind": "a checkpoint with decided epochs that the ledger does not know is refused",
    "mark ahead": "a target that holds what the ledger does not know is refused",
    "mark behind": "a target that lacks what the ledger calls done is refused",
    "read before conclusion": "a driver concludes nothing from a target before it has read the ledger again",
    "both marks": "before an epoch is done, its mark and that of the epoch before it are read",
    "mark replaced": "the mark of a target without transactions is written only over the one that was compared",
    "incarnation": "and only in the index in which it was compared",
}
TARGETS: Final = ("transactions", "documents")
SWEEPS: Final = ("sweep", "prepare", "undo")
FAILED: Final = ("failed", "unknown")
ACCEPTED, LOSER, TURNS = 0, -1, 3


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


class Move(NamedTuple):
    """A step, or a fault of this kind, and the state after it."""

    name: str
    to: State
    fault: str = ""


Moves = Iterator[Move]


class Protocol:
    """The steps, each a method of this name in `Driver`. ``lacks`` is the rule that a mutant lacks."""

    def __init__(self, lacks: str = "", epochs: int = EPOCHS) -> None:
        self.rules = RULES.keys() - {lacks}
        self.epochs = epochs

    def moves(self, s: State) -> Moves:
        """Yield all that may happen next in a state."""
        if not s.stopped:
            found_out = [move for d in s.drivers if d.generation < s.ledger.owner for move in self.steps(s, d)]
            # what a superseded driver finds out changes nothing else: no order of that and other steps matters
            yield from [move for move in found_out if move.name in ("fenced", "end")][:1] or self.all_moves(s)

    def all_moves(self, s: State) -> Moves:
        """Yield each step of each thread, each start, each late request, each fault."""
        for d in s.drivers:
            yield from self.steps(s, d)
        if not s.drivers and not good(s):
            yield Move("start", begun(s))
        for request in s.late:
            yield Move(f"late {request[0]}", self.apply(s._replace(late=s.late - {request}), request)[0])
        yield from faults(s)

    def steps(self, s: State, d: Driver) -> Moves:
        """Yield the next steps of a driver's two threads."""
        sweeps, replays = d.stream in SWEEPS, d.commit in ("prepare_again", "record_again") and "alone" in self.rules
        if sweeps and d.commit == "unknown":
            yield Move("left for the next start", put(s, d, d._replace(stream="ended")))
        elif not (sweeps and replays):
            yield from getattr(self, d.stream)(s, d)
        yield from getattr(self, d.commit)(s, d)

    # ---- a start

    def take(self, s: State, d: Driver) -> Moves:
        """Step 0: append `take`, which fences every earlier driver. What is decided must have a ledger."""
        if s.commits and s.ledger == Ledger() and "ledger behind" in self.rules:
            yield Move("stop", s._replace(stopped="the ledger is the older copy", drivers=()))
        else:
            s = renumbered(s)
            owner = Generation(1 + max(generations(s)))
            yield self.taken(s, d, owner)
            late = s.late | {("append", "take", owner)}
            yield Move("take: reply lost", put(s._replace(late=late), d, None), "reply lost")

    def taken(self, s: State, d: Driver, owner: Generation) -> Move:
        """Return the step by which a driver becomes the owner of the ledger."""
        s = self.appended(s, s.ledger._replace(owner=owner))
        return Move("take", put(s, d, d._replace(stream="compare", generation=owner, known=s.ledger)))

    def compare(self, s: State, d: Driver) -> Moves:
        """Step 0: compare checkpoint, ledger and targets."""
        if s.commits > len(d.known.records) and "ledger behind" in self.rules:
            yield self.conclude(s, d, "the ledger is the older copy", None)
        else:
            yield self.compared(s, d, TARGETS, d._replace(stream="sweep"), None)

    def compared(self, s: State, d: Driver, targets: tuple[str, ...], then: Driver, fenced: Driver | None) -> Move:
        """Compare marks with the ledger, as ``then`` knows it: go on as ``then``, or conclude."""
        for target in targets:
            why = self.disagreement(s.transactions.mark if target == "transactions" else s.documents.mark, then.known)
            if why and s.ledger.owner == d.generation and s.ledger != then.known:
                return Move("read on", put(s, d, d._replace(known=s.ledger)))
            if why:
                return self.conclude(s, d, f"{target}: {why}", fenced)
        return Move("compare", put(s, d, then))

    def disagreement(self, mark: Mark, ledger: Ledger) -> str:
        """Return how they disagree: a target must hold the last done epoch, and may hold the next one."""
        done = ledger.records[ledger.done - 1][:2] if ledger.done else None
        if mark == done or mark in [part[:2] for part in ledger.pending[:1]]:
            return ""
        if mark is None or (done and mark[0] < done[0]):
            return "the target is the older copy" if "mark behind" in self.rules else ""
        return "the checkpoint is the older copy" if "mark ahead" in self.rules else ""

    def conclude(self, s: State, d: Driver, why: str, fenced: Driver | None) -> Move:
        """Stop the query until an operator comes, provided that the ledger is still this driver's."""
        if s.ledger.owner != d.generation and "read before conclusion" in self.rules:
            return Move("fenced", put(s, d, fenced))
        return Move("stop", s._replace(stopped=why, drivers=()))

    def sweep(self, s: State, d: Driver) -> Moves:
        """Step 0: end what no record names."""
        kept = d.known.pending if "spared" in self.rules else ()
        yield from self.swept(s, d, kept, None) or [Move("swept", put(s, d, d._replace(stream="recover")))]

    def swept(self, s: State, d: Driver, kept: tuple[Part, ...], lost: Driver | None) -> list[Move]:
        """Return the moves that end the next thing that is not ``kept``; none if there is nothing to end."""
        for part in sorted(s.transactions.prepared.difference(kept)):
            if part in d.known.records[: d.known.done] and "evidence" in self.rules:
                return [self.conclude(s, d, "transactions: a done epoch is prepared", lost)]
            if part.generation <= d.generation or "older" not in self.rules:
                return list(self.send(s, d, ("abort", part), {"": d}, [lost]))
        for attempt in sorted(s.spool.difference(part[:2] for part in kept)):
            if attempt[1] <= d.generation:
                return [Move("drop rows", put(s._replace(spool=s.spool - {attempt}), d, d))]
        return []

    def recover(self, s: State, d: Driver) -> Moves:
        """Step 0: wait until the commit thread has committed what is decided."""
        if d.commit in FAILED:
            yield Move("start fails", put(s, d, None))
        elif d.known.done >= min(s.commits, len(d.known.records)):
            yield Move("recovered", put(s, d, d._replace(stream="plan")))

    # ---- an epoch, in the stream thread

    def plan(self, s: State, d: Driver) -> Moves:
        """Spark writes offsets/N, unless it exists."""
        if d.epoch == self.epochs:
            yield Move("no more input", put(s, d, d._replace(stream="ended")))
        elif d.epoch < len(s.offsets):
            yield from self.settle(s, d)
        else:
            # after a restore the source may have more: an epoch of the same number gets other input
            for rows in "ab" if s.restored else "a":
                planned = s._replace(offsets=(*s.offsets, rows))
                yield Move("plan", put(planned, d, d._replace(stream="settle")))

    def settle(self, s: State, d: Driver) -> Moves:
        """Step 1: read the ledger; adopt the epoch, or compare."""
        n, ended = d.epoch, d._replace(stream="ended")
        if d.commit in FAILED or s.ledger.owner != d.generation:
            yield Move("fenced", put(s, d, ended))
        elif n > len(s.ledger.records):
            yield self.conclude(s, d, "an epoch was decided without a record", ended)
        elif any(s.commits <= part.epoch < n for part in s.ledger.pending):
            yield self.conclude(s, d, "an epoch before this one is recorded and not decided", ended)
        elif n == len(s.ledger.records) or "adopted" not in self.rules:
            yield self.compared(s, d, TARGETS, d._replace(stream="prepare", known=s.ledger), ended)
        elif s.ledger.records[n].rows != s.offsets[n] and "input" in self.rules:
            yield self.conclude(s, d, "an epoch is recorded with other input", ended)
        elif s.ledger.done >= n:
            yield Move("adopt", put(s, d, d._replace(stream="decide", known=s.ledger)))

    def prepare(self, s: State, d: Driver) -> Moves:
        """Step 1: end what no record names. Step 2: the tasks keep their rows and prepare them."""
        kept = tuple(part for part in d.known.pending if part.epoch < d.epoch)
        if swept := self.swept(s, d, kept, d._replace(stream="ended")):
            yield from swept
            return
        part = part_of(s, d)
        spooled = put(s._replace(spool=s.spool | {part[:2]}), d, d)
        to = {"": d._replace(stream="vote")}
        yield from self.send(spooled, d, ("prepare", part), to, [d._replace(stream="abandon")])

    def vote(self, s: State, d: Driver) -> Moves:
        """Step 3: vote, when every earlier epoch is done."""
        if d.commit in FAILED or part_of(s, d) not in s.transactions.prepared:
            yield Move("vote fails", put(s, d, d._replace(stream="abandon")))
        elif d.known.done >= d.epoch:
            yield Move("vote", put(s, d, d._replace(stream="record")))

    def record(self, s: State, d: Driver) -> Moves:
        """Step 4: append `prepared`; nothing ends it from here on."""
        abandon = d._replace(stream="abandon")
        unknown = d._replace(stream="ended") if "unknown append" in self.rules else abandon
        to = {"": d._replace(stream="decide"), "fenced": abandon}
        yield from self.send(s, d, ("append", "prepared", part_of(s, d)), to, [unknown])

    def decide(self, s: State, d: Driver) -> Moves:
        """Step 5: Spark writes commits/N, unless it exists."""
        to = {"": d._replace(stream="plan", epoch=d.epoch + 1), "exists": d._replace(stream="ended")}
        yield from self.send(s, d, ("decide", d.epoch), to, [d._replace(stream="ended")])

    def abandon(self, s: State, d: Driver) -> Moves:
        """Read the ledger, whoever has it: this attempt has failed, and is not recorded."""
        yield Move("read", put(s, d, d._replace(stream="undo", known=s.ledger)))

    def undo(self, s: State, d: Driver) -> Moves:
        """End what the ledger lacks."""
        ended = d._replace(stream="ended")
        yield from self.swept(s, d, d.known.pending, ended) or [Move("undone", put(s, d, ended))]

    def ended(self, s: State, d: Driver) -> Moves:
        """Step 7: end the process when all that is decided is committed, or the commit thread has failed."""
        if d.commit in FAILED or (d.commit == "idle" and d.known.done >= min(s.commits, len(d.known.records))):
            yield Move("end", put(s, d, None))

    # ---- the commit of an epoch, in the other thread, beside the next epoch

    def idle(self, s: State, d: Driver) -> Moves:
        """Step 6: when the oldest pending epoch is decided, read the ledger."""
        n = d.known.done
        if d.stream in ("take", "compare", "sweep") or not d.known.pending:
            return
        if s.commits > n or "decided" not in self.rules:
            if s.ledger.owner != d.generation:
                yield Move("fenced", put(s, d, failed(d)))
            elif s.ledger.records[n].rows != s.offsets[n] and "input" in self.rules:
                yield self.conclude(s, d, "an epoch is recorded with other input", failed(d))
            else:
                compare = d._replace(commit="compare_transactions", known=s.ledger, part=s.ledger.records[n])
                yield Move("read", put(s, d, compare))

    def compare_transactions(self, s: State, d: Driver) -> Moves:
        """Step 6: compare, before anything becomes visible that would hide a loss."""
        yield self.compared(s, d, TARGETS[:1], d._replace(commit="commit"), failed(d))

    def commit(self, s: State, d: Driver) -> Moves:
        """Step 6: commit the transaction that the ledger names. May be repeated."""
        committed = d._replace(commit="compare_documents")
        gone = d._replace(commit="ask") if "gone is not done" in self.rules else committed
        yield from self.send(s, d, ("commit", d.part), {"": committed, "gone": gone}, [d, failed(d)])

    def ask(self, s: State, d: Driver) -> Moves:
        """Step 6: it is gone. The mark tells whether it is committed; if not, the ledger has to be read again."""
        if s.transactions.mark == d.part[:2] and "gone is not aborted" in self.rules:
            yield Move("it is committed", put(s, d, d._replace(commit="compare_documents")))
        elif s.ledger.owner != d.generation or again(d).copy > TURNS:
            yield Move("fenced", put(s, d, failed(d)))
        elif d.stream not in SWEEPS or "alone" not in self.rules:
            yield Move("it is aborted", put(s, d, d._replace(commit="prepare_again")))

    def prepare_again(self, s: State, d: Driver) -> Moves:
        """Step 6: prepare the rows again, under another name."""
        if d.part[:2] not in s.spool:
            yield self.conclude(s, d, "the rows are gone", failed(d))
        else:
            to = {"": d._replace(commit="record_again")}
            yield from self.send(s, d, ("prepare", again(d)), to, [failed(d)])

    def record_again(self, s: State, d: Driver) -> Moves:
        """Step 6: append `replay`; from here on the ledger names the new transaction."""
        compare = d._replace(commit="compare_transactions", part=again(d))
        if "replay recorded" in self.rules:
            to = {"": compare, "fenced": failed(d)}
            unknown = failed(d, "unknown" if "unknown replay" in self.rules else "failed")
            yield from self.send(s, d, ("append", "replay", again(d)), to, [unknown])
        else:
            yield Move("not recorded", put(s, d, compare))

    def compare_documents(self, s: State, d: Driver) -> Moves:
        """Step 6: compare, and remember what was seen."""
        write = d._replace(commit="write", seen=(s.documents.mark, s.documents.incarnation))
        yield self.compared(s, d, TARGETS[1:], write, failed(d))

    def write(self, s: State, d: Driver) -> Moves:
        """Step 6: write the epoch's own document and the shared one, from the spool, unless the mark shows them."""
        part = d.part
        if s.documents.mark == part[:2]:
            yield Move("it is written", put(s, d, d._replace(commit="done", seen=None)))
        elif any(epoch == part.epoch and attempt != part.attempt for epoch, attempt, _ in s.documents.own):
            yield self.conclude(s, d, "documents: an epoch is applied in part by another attempt", failed(d))
        elif part[:2] not in s.spool:
            yield self.conclude(s, d, "the rows are gone", failed(d))
        else:
            request = ("write", part.epoch, part.attempt, part.rows)
            yield from self.send(s, d, request, {"": d._replace(commit="mark")}, [d, failed(d)])

    def mark(self, s: State, d: Driver) -> Moves:
        """Step 6: write the mark last."""
        request = ("mark", d.part[:2], d.seen)
        s = s if "rows kept" in self.rules else s._replace(spool=s.spool - {d.part[:2]})
        if self.apply(s, request)[1] == "changed":
            yield self.conclude(s, d, "documents: the target changed during the commit", failed(d))
        else:
            yield from self.send(s, d, request, {"": d._replace(commit="done", seen=None)}, [d, failed(d)])

    def done(self, s: State, d: Driver) -> Moves:
        """Step 6: look at both marks, as a commit cannot depend on one; append `done`; drop the rows."""
        part = d.part
        marks = [one[:2] for one in (*d.known.records[: part.epoch], part)][-2:]
        if [one[:2] for one in s.transactions.visible[-2:]] != marks and "both marks" in self.rules:
            yield self.conclude(s, d, "transactions: the target changed during the commit", failed(d))
            return
        rows = s.spool - {part[:2]}
        to = {"": d._replace(commit="idle", part=NONE), "fenced": failed(d)}
        for move in self.send(s, d, ("append", "done", part.epoch), to, [failed(d)]):
            yield move._replace(to=move.to._replace(spool=rows)) if move.to.ledger.done > part.epoch else move

    def failed(self, _: State, __: Driver) -> Moves:
        """Nothing more: the stream thread stops when it looks."""
        yield from ()

    # what was prepared again may be recorded
    unknown = failed

    # ---- requests

    def send(self, s: State, d: Driver, request: Request, to: dict[str, Driver], lost: list[Driver | None]) -> Moves:
        """Yield what a request leads to: the driver of its answer; each of ``lost`` if the reply is lost."""
        if request[0] == "append" and s.ledger.owner != d.generation and "owned" in self.rules:
            # the number is taken; the driver reads on, and finds the `take` of another
            yield Move("fenced", put(s, d, to["fenced"]))
            return
        after, answer = self.apply(s, request)
        then = to[answer]._replace(known=after.ledger) if request[0] == "append" else to[answer]
        yield Move(request[0], put(after, d, then))
        for driver in lost:
            yield Move(f"{request[0]}: reply lost", put(s._replace(late=s.late | {request}), d, driver), "reply lost")

    def apply(self, s: State, request: Request) -> tuple[State, str]:  # noqa: C901, PLR0911, PLR0912 - a case for each request
        """Return the state after a request has reached its place, and the answer."""
        prepared, (own, shared, mark, incarnation) = s.transactions.prepared, s.documents
        match request:
            case "prepare", part:
                return with_prepared(s, prepared | {part}), ""
            case "abort", part:
                harm = "ended what is recorded" if part in prepared and part in s.ledger.records else s.harm
                return with_prepared(s, prepared - {part})._replace(harm=harm), ""
            case "commit", part if part not in prepared:
                return s, "gone"
            case "commit", part:
                others = () if "accepted" in self.rules else {one for one in prepared if one[:2] == part[:2]} - {part}
                visible = (*s.transactions.visible, part, *others)
                return with_prepared(s, prepared.difference(visible), visible), ""
            case "write", epoch, attempt, rows:
                kept = [document for document in own if document[0] != epoch or "same id" not in self.rules]
                newest = max(epoch, shared) if "version" in self.rules else epoch
                written = Documents(tuple(sorted([*kept, (epoch, attempt, rows)])), newest, mark, incarnation)
                return s._replace(documents=written), ""
            case "mark", new, seen:
                if incarnation != seen[1] and "incarnation" in self.rules:
                    return s, "changed"
                if mark not in (seen[0], new) and "mark replaced" in self.rules:
                    return s, "changed"
                return s._replace(documents=s.documents._replace(mark=new)), ""
            case "decide", epoch:
                if epoch < s.commits:
                    return s, "exists"
                return s._replace(commits=epoch + 1, ever=s.ever | {(epoch, s.offsets[epoch])}), ""
            case "append", "take", owner:
                return self.appended(s, s.ledger._replace(owner=owner)), ""
            case "append", "done", epoch:
                return self.appended(s, s.ledger._replace(done=epoch + 1)), ""
            case _, _, part:
                records = (*s.ledger.records[: part.epoch], part, *s.ledger.records[part.epoch + 1 :])
                return self.appended(s, s.ledger._replace(records=records)), ""
        raise AssertionError(request)

    def appended(self, s: State, ledger: Ledger) -> State:
        """Return the state with a new entry. It has taken the number of any that is under way."""
        late = (request for request in s.late if request[0] != "append" or "number" not in self.rules)
        return s._replace(ledger=ledger, late=frozenset(late))


# ---- faults


def faults(s: State) -> Moves:
    """Yield what may happen at any time, beside the replies that `Protocol.send` loses."""
    for d in s.drivers:
        yield Move("crash", put(s, d, None), "crash")
        if d.stream in ("vote", "record"):
            loser = ("prepare", part_of(s, d)._replace(copy=LOSER))
            yield Move("a losing task prepares", s._replace(late=s.late | {loser}), "losing task")
    if len(s.drivers) == 1:
        yield Move("another driver starts", begun(s), "another driver")
    for part in s.transactions.prepared:
        yield Move("a transaction times out", with_prepared(s, s.transactions.prepared - {part}), "time-out")
    yield from set_back(s)
    yield from restored(s)


def set_back(s: State) -> Moves:
    """Restore a target from a backup, or let it fail over to a copy that lacks its newest epoch."""
    prepared, visible = s.transactions
    for last in visible[-1:]:
        lost = s._replace(lost=s.lost | {("transactions", last.epoch)})
        for still in (prepared, prepared | {last}):
            yield Move("transactions are set back", with_prepared(lost, still, visible[:-1]), "set back")
    newest = s.documents.mark[0] if s.documents.mark else -1
    for epoch in {newest, max(newest - 1, -1)}:
        own = tuple(document for document in s.documents.own if document[0] <= epoch)
        if own != s.documents.own:
            mark = own[-1][:2] if own else None
            gone = {("documents", document[0]) for document in s.documents.own[len(own) :]}
            documents = Documents(own, epoch, mark, s.documents.incarnation + 1)
            yield Move("documents are set back", s._replace(documents=documents, lost=s.lost | gone), "set back")


def restored(s: State) -> Moves:
    """Stop everything, and put back an older copy of the checkpoint, of the ledger, or of both."""
    late = frozenset(request for request in s.late if request[0] not in ("append", "decide"))
    s = s._replace(drivers=(), late=late, restored=True)
    if s.commits:
        yield Move("commits/N is deleted", s._replace(commits=s.commits - 1), "restore")
    for n in range(min(s.commits, len(s.ledger.records) + 1)):
        owner = s.ledger.records[n - 1].attempt if n else Generation(0)
        checkpoint = s._replace(commits=n, offsets=s.offsets[:n])
        yield Move("the checkpoint is restored", checkpoint, "restore")
        # the copy may be of before the commit of its newest epoch
        for done in {min(n, s.ledger.done), max(n - 1, 0)}:
            ledger = Ledger(owner, s.ledger.records[:n], min(done, s.ledger.done))
            yield Move("checkpoint and ledger are restored", checkpoint._replace(ledger=ledger), "restore")
            yield Move("the ledger is restored", s._replace(ledger=ledger), "restore")


FAULTS: Final = ("crash", "another driver", "reply lost", "time-out", "losing task", "set back", "restore")


# ---- invariants


def violation(s: State) -> str:
    """Return what is wrong in a state, "" if nothing is."""
    visible, own = s.transactions.visible, s.documents.own
    rows = {*((part.epoch, part.rows) for part in visible), *((epoch, rows) for epoch, _, rows in own)}
    attempts = {*(part[:2] for part in visible), *(document[:2] for document in own)}
    wrong = {
        s.harm: bool(s.harm),
        f"stopped without a cause: {s.stopped}": bool(s.stopped) and not (s.restored or s.lost),
        "early": not rows <= s.ever,
        "of a losing task": any(part.copy == LOSER for part in visible),
        "doubled": any(len({epoch for epoch, *_ in some}) < len(some) for some in (visible, own)),
        "stale": s.documents.mark is not None and s.documents.shared < s.documents.mark[0],
        "two attempts": len({epoch for epoch, _ in attempts}) < len(attempts) and not s.restored,
    }
    return next((what for what, so in wrong.items() if so), "" if s.restored else missing(s))


def missing(s: State) -> str:
    """Return what of a decided epoch is nowhere, unless the target was set back."""
    if s.commits > len(s.ledger.records):
        return "decided without a record"
    for target, applied in zip(TARGETS, (s.transactions.visible, s.documents.own), strict=True):
        held = {epoch for epoch, *_ in applied} | {epoch for name, epoch in s.lost if name == target}
        for part in s.ledger.records[: s.commits]:
            if part.epoch < s.ledger.done and part.epoch not in held:
                return f"done, and not in {target}"
            prepared = target == "transactions" and part in s.transactions.prepared
            if part.epoch not in held and part[:2] not in s.spool and not prepared:
                return f"lost for {target}"
    return ""


def good(s: State) -> bool:
    """Return whether the query may rest: everything is visible and nothing left over, or an operator is called."""
    epochs = list(enumerate(s.offsets))
    return bool(s.stopped) or (
        s.commits == s.ledger.done == s.documents.shared + 1 == EPOCHS
        and [(part.epoch, part.rows) for part in s.transactions.visible] == epochs
        and [(epoch, rows) for epoch, _, rows in s.documents.own] == epochs
        and not (s.drivers or s.transactions.prepared or s.spool)
    )


# ---- parts of a state


def put(s: State, d: Driver, changed: Driver | None) -> State:
    """Return a state in which a driver has changed, or its process has ended."""
    at = s.drivers.index(d)
    return s._replace(drivers=(*s.drivers[:at], *([changed] if changed else []), *s.drivers[at + 1 :]))


def begun(s: State) -> State:
    """Return a state with one more driver. Spark runs the last planned epoch again, unless its commit exists."""
    return s._replace(drivers=(*s.drivers, Driver(epoch=len(s.offsets) - (s.commits < len(s.offsets)))))


def with_prepared(s: State, prepared: frozenset[Part], visible: tuple[Part, ...] | None = None) -> State:
    """Return a state in which a target's transactions have changed."""
    return s._replace(transactions=Transactions(prepared, s.transactions.visible if visible is None else visible))


def failed(d: Driver, how: str = "failed") -> Driver:
    """Return a driver whose commit thread has stopped; the stream thread stops when it looks."""
    return d._replace(commit=how, part=NONE, seen=None)


def part_of(s: State, d: Driver) -> Part:
    """Return what the accepted tasks of a driver's attempt prepare."""
    return Part(d.epoch, d.generation, d.generation, ACCEPTED, s.offsets[d.epoch])


def again(d: Driver) -> Part:
    """Return what the commit thread commits, under the name that this driver gives it when it prepares it again."""
    return d.part._replace(generation=d.generation, copy=1 + (d.part.generation == d.generation and d.part.copy))


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
