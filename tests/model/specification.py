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

from collections.abc import Mapping, Sequence
from typing import Any, Final

from model.state import (
    DEAD,
    FAILED,
    LOSER,
    STREAM,
    SWEEPS,
    Documents,
    Driver,
    Generation,
    Ledger,
    Mark,
    Move,
    Moves,
    Part,
    Request,
    State,
    generations,
    renumbered,
    step,
)

EPOCHS: Final = 3
RULES: Final = {
    "decided": "an epoch is committed only after Spark has decided it",
    "owned": "only the last driver that took the ledger appends to it",
    "number": "an entry is created if its number is free, and never overwritten",
    "adopted": "a recorded epoch that runs again is not written again",
    "spared": "a start ends nothing that is recorded, decided or not",
    "finished": "a commit that a target has lost is repeated, if what it had committed is prepared there again",
    "evidence": "what else a target holds prepared of a done epoch shows that it was set back, and is not ended",
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
TURNS: Final = 3
"""How often a part of an epoch is prepared again."""


class Protocol:
    """The steps, each a method of this name in `Driver`. ``lacks`` is the rule that a mutant lacks."""

    def __init__(self, lacks: str = "", epochs: int = EPOCHS) -> None:
        self.rules = RULES.keys() - {lacks}
        self.epochs = epochs

    def moves(self, s: State) -> Moves:
        """Yield all that may happen next: each step of each thread, each start, each late request, each fault."""
        if s.stopped:
            return
        steps = [(d, move) for d in s.drivers for move in self.steps(s, d)]
        # what a superseded driver finds out changes nothing else: no order of that and other steps matters
        for d, move in steps:
            if d.generation < s.ledger.owner and move.name in ("fenced", "end"):
                yield move
                return
        yield from (move for _, move in steps)
        if not s.drivers and not good(s):
            yield Move("start", s.begun())
        for request in s.late:
            yield Move(f"late {request[0]}", self.apply(s._replace(late=s.late - {request}), request)[0])
        yield from faults(s)

    def steps(self, s: State, d: Driver) -> Moves:
        """Yield the next steps of a driver's two threads."""
        sweeps, replays = d.stream in SWEEPS, d.commit in ("prepare_again", "record_again") and "alone" in self.rules
        if sweeps and d.commit == "unknown":
            yield step("left for the next start", s, d, "ended")
        elif not (sweeps and replays):
            yield from getattr(self, d.stream)(s, d)
        # the stream thread stops when it sees that the other one has failed
        yield from getattr(self, d.commit)(s, d) if d.commit not in FAILED else ()

    # ---- a start

    def take(self, s: State, d: Driver) -> Moves:
        """Step 0: append `take`, which fences every earlier driver. What is decided must have a ledger."""
        if s.commits and s.ledger == Ledger() and "ledger behind" in self.rules:
            yield Move("stop", s._replace(stopped="the ledger is the older copy", drivers=()))
        else:
            s = renumbered(s)
            owner = Generation(1 + max(generations(s)))
            yield self.taken(s, d, owner)
            yield step("take: reply lost", s.under_way(("append", "take", owner)), d, DEAD, "reply lost")

    def taken(self, s: State, d: Driver, owner: Generation) -> Move:
        """Return the step by which a driver becomes the owner of the ledger."""
        s, _ = self.apply(s, ("append", "take", owner))
        return step("take", s, d, "compare", generation=owner, known=s.ledger)

    def compare(self, s: State, d: Driver) -> Moves:
        """Step 0: compare checkpoint, ledger and targets."""
        if s.commits > len(d.known.records) and "ledger behind" in self.rules:
            yield self.conclude(s, d, "the ledger is the older copy", DEAD)
        else:
            yield from self.compared(s, d, TARGETS, "sweep", DEAD)

    def compared(self, s: State, d: Driver, targets: Sequence[str], to: str, fenced: str, **more: Any) -> Moves:
        """Compare marks with the ledger as the driver knows it: go on, repeat a commit that was lost, or conclude."""
        known = more.get("known", d.known)
        for target in targets:
            mark = getattr(s, target).mark
            if not (why := self.disagreement(mark, known)):
                continue
            lost = known.last_done if target == "transactions" else ()
            if s.ledger.owner == d.generation and s.ledger != known:
                yield Move("read on", s.put(d, d._replace(known=s.ledger)))
            elif s.transactions.prepared.intersection(lost) and "finished" in self.rules:
                here = d.stream if to in STREAM else d.commit
                yield from self.send(s, d, ("commit", *lost), {"": here}, here, fenced)
            else:
                yield self.conclude(s, d, f"{target}: {why}", fenced)
            return
        yield step("compare", s, d, to, **more)

    def disagreement(self, mark: Mark, ledger: Ledger) -> str:
        """Return how they disagree: a target must hold the last done epoch, and may hold the next one."""
        done = ledger.last_done[0][:2] if ledger.done else None
        if mark == done or mark in [part[:2] for part in ledger.pending[:1]]:
            return ""
        if mark is None or (done and mark[0] < done[0]):
            return "the target is the older copy" if "mark behind" in self.rules else ""
        return "the checkpoint is the older copy" if "mark ahead" in self.rules else ""

    def conclude(self, s: State, d: Driver, why: str, fenced: str) -> Move:
        """Stop the query until an operator comes, provided that the ledger is still this driver's."""
        if s.ledger.owner != d.generation and "read before conclusion" in self.rules:
            return step("fenced", s, d, fenced)
        return Move("stop", s._replace(stopped=why, drivers=()))

    def sweep(self, s: State, d: Driver) -> Moves:
        """Step 0: end what no record names."""
        kept = d.known.pending if "spared" in self.rules else ()
        yield from self.swept(s, d, kept, DEAD) or [step("swept", s, d, "recover")]

    def swept(self, s: State, d: Driver, kept: Sequence[Part], lost: str) -> list[Move]:
        """Return the moves that end the next thing that is not ``kept``; none if there is nothing to end."""
        for part in sorted(s.transactions.prepared.difference(kept)):
            if part in d.known.records[: d.known.done] and "evidence" in self.rules:
                return [self.conclude(s, d, "transactions: a done epoch is prepared", lost)]
            if part.generation <= d.generation or "older" not in self.rules:
                return list(self.send(s, d, ("abort", part), {"": d.stream}, lost))
        for attempt in sorted(s.spool.difference(part[:2] for part in kept)):
            if attempt[1] <= d.generation:
                return [Move("drop rows", s._replace(spool=s.spool - {attempt}))]
        return []

    def recover(self, s: State, d: Driver) -> Moves:
        """Step 0: wait until the commit thread has committed what is decided."""
        if d.commit in FAILED:
            yield step("start fails", s, d, DEAD)
        elif d.known.done >= min(s.commits, len(d.known.records)):
            yield step("recovered", s, d, "plan")

    # ---- an epoch, in the stream thread

    def plan(self, s: State, d: Driver) -> Moves:
        """Spark writes offsets/N, unless it exists."""
        if d.epoch == self.epochs:
            yield step("no more input", s, d, "ended")
        elif d.epoch < len(s.offsets):
            yield from self.settle(s, d)
        else:
            # after a restore the source may have more: an epoch of the same number gets other input
            for rows in "ab" if s.restored else "a":
                yield step("plan", s._replace(offsets=(*s.offsets, rows)), d, "settle")

    def settle(self, s: State, d: Driver) -> Moves:
        """Step 1: read the ledger; adopt the epoch, or compare."""
        n, ledger = d.epoch, s.ledger
        if d.commit in FAILED or ledger.owner != d.generation:
            yield step("fenced", s, d, "ended")
        elif n > len(ledger.records):
            yield self.conclude(s, d, "an epoch was decided without a record", "ended")
        elif any(s.commits <= part.epoch < n for part in ledger.pending):
            yield self.conclude(s, d, "an epoch before this one is recorded and not decided", "ended")
        elif n == len(ledger.records) or "adopted" not in self.rules:
            yield from self.compared(s, d, TARGETS, "prepare", "ended", known=ledger)
        elif ledger.records[n].rows != s.offsets[n] and "input" in self.rules:
            yield self.conclude(s, d, "an epoch is recorded with other input", "ended")
        elif ledger.done >= n:
            yield step("adopt", s, d, "decide", known=ledger)

    def prepare(self, s: State, d: Driver) -> Moves:
        """Step 1: end what no record names. Step 2: the tasks keep their rows and prepare them."""
        kept = [part for part in d.known.pending if part.epoch < d.epoch]
        part = s.part_of(d)
        spooled = s._replace(spool=s.spool | {part[:2]})
        yield from self.swept(s, d, kept, "ended") or self.send(spooled, d, ("prepare", part), {"": "vote"}, "abandon")

    def vote(self, s: State, d: Driver) -> Moves:
        """Step 3: vote, when every earlier epoch is done."""
        if d.commit in FAILED or s.part_of(d) not in s.transactions.prepared:
            yield step("vote fails", s, d, "abandon")
        elif d.known.done >= d.epoch:
            yield step("vote", s, d, "record")

    def record(self, s: State, d: Driver) -> Moves:
        """Step 4: append `prepared`; nothing ends it from here on."""
        unknown = "ended" if "unknown append" in self.rules else "abandon"
        to = {"": "decide", "fenced": "abandon"}
        yield from self.send(s, d, ("append", "prepared", s.part_of(d)), to, unknown)

    def decide(self, s: State, d: Driver) -> Moves:
        """Step 5: Spark writes commits/N, unless it exists."""
        yield from self.send(s, d, ("decide", d.epoch), {"": "plan", "exists": "ended"}, "ended", epoch=d.epoch + 1)

    def abandon(self, s: State, d: Driver) -> Moves:
        """Read the ledger, whoever has it: this attempt has failed, and is not recorded."""
        yield step("read", s, d, "undo", known=s.ledger)

    def undo(self, s: State, d: Driver) -> Moves:
        """End what the ledger lacks."""
        yield from self.swept(s, d, d.known.pending, "ended") or [step("undone", s, d, "ended")]

    def ended(self, s: State, d: Driver) -> Moves:
        """Step 7: end the process when all that is decided is committed, or the commit thread has failed."""
        if d.commit in FAILED or (d.commit == "idle" and d.known.done >= min(s.commits, len(d.known.records))):
            yield step("end", s, d, DEAD)

    # ---- the commit of an epoch, in the other thread, beside the next epoch

    def idle(self, s: State, d: Driver) -> Moves:
        """Step 6: when the oldest pending epoch is decided, read the ledger."""
        n = d.known.done
        if d.stream in ("take", "compare", "sweep") or not d.known.pending:
            return
        if s.commits > n or "decided" not in self.rules:
            if s.ledger.owner != d.generation:
                yield step("fenced", s, d, "failed")
            elif s.ledger.records[n].rows != s.offsets[n] and "input" in self.rules:
                yield self.conclude(s, d, "an epoch is recorded with other input", "failed")
            else:
                yield step("read", s, d, "compare_transactions", known=s.ledger, part=s.ledger.records[n])

    def compare_transactions(self, s: State, d: Driver) -> Moves:
        """Step 6: compare, before anything becomes visible that would hide a loss."""
        yield from self.compared(s, d, TARGETS[:1], "commit", "failed")

    def commit(self, s: State, d: Driver) -> Moves:
        """Step 6: commit the transaction that the ledger names. May be repeated."""
        to = {"": "compare_documents", "gone": "ask" if "gone is not done" in self.rules else "compare_documents"}
        yield from self.send(s, d, ("commit", d.part), to, "commit", "failed")

    def ask(self, s: State, d: Driver) -> Moves:
        """Step 6: it is gone. The mark tells whether it is committed; if not, the ledger has to be read again."""
        if s.transactions.mark == d.part[:2] and "gone is not aborted" in self.rules:
            yield step("it is committed", s, d, "compare_documents")
        elif s.ledger.owner != d.generation or d.again.copy > TURNS:
            yield step("fenced", s, d, "failed")
        elif d.stream not in SWEEPS or "alone" not in self.rules:
            yield step("it is aborted", s, d, "prepare_again")

    def prepare_again(self, s: State, d: Driver) -> Moves:
        """Step 6: prepare the rows again, under another name."""
        if d.part[:2] not in s.spool:
            yield self.conclude(s, d, "the rows are gone", "failed")
        else:
            yield from self.send(s, d, ("prepare", d.again), {"": "record_again"}, "failed")

    def record_again(self, s: State, d: Driver) -> Moves:
        """Step 6: append `replay`; from here on the ledger names the new transaction."""
        to = {"": "compare_transactions", "fenced": "failed"}
        if "replay recorded" in self.rules:
            unknown = "unknown" if "unknown replay" in self.rules else "failed"
            yield from self.send(s, d, ("append", "replay", d.again), to, unknown, part=d.again)
        else:
            yield step("not recorded", s, d, to[""], part=d.again)

    def compare_documents(self, s: State, d: Driver) -> Moves:
        """Step 6: compare, and remember what was seen."""
        seen = s.documents.mark, s.documents.incarnation
        yield from self.compared(s, d, TARGETS[1:], "write", "failed", seen=seen)

    def write(self, s: State, d: Driver) -> Moves:
        """Step 6: write the epoch's own document and the shared one, from the spool, unless the mark shows them."""
        part = d.part
        if s.documents.mark == part[:2]:
            yield step("it is written", s, d, "done")
        elif any(epoch == part.epoch and attempt != part.attempt for epoch, attempt, _ in s.documents.own):
            yield self.conclude(s, d, "documents: an epoch is applied in part by another attempt", "failed")
        elif part[:2] not in s.spool:
            yield self.conclude(s, d, "the rows are gone", "failed")
        else:
            request = ("write", part.epoch, part.attempt, part.rows)
            yield from self.send(s, d, request, {"": "mark"}, "write", "failed")

    def mark(self, s: State, d: Driver) -> Moves:
        """Step 6: write the mark last."""
        request = ("mark", d.part[:2], d.seen)
        s = s if "rows kept" in self.rules else s._replace(spool=s.spool - {d.part[:2]})
        if self.apply(s, request)[1] == "changed":
            yield self.conclude(s, d, "documents: the target changed during the commit", "failed")
        else:
            yield from self.send(s, d, request, {"": "done"}, "mark", "failed")

    def done(self, s: State, d: Driver) -> Moves:
        """Step 6: look at both marks, as a commit cannot depend on one; append `done`; drop the rows."""
        part = d.part
        marks = [one[:2] for one in (*d.known.records[: part.epoch], part)][-2:]
        if [one[:2] for one in s.transactions.visible[-2:]] != marks and "both marks" in self.rules:
            yield self.conclude(s, d, "transactions: the target changed during the commit", "failed")
            return
        to = {"": "idle", "fenced": "failed"}
        for move in self.send(s, d, ("append", "done", part.epoch), to, "failed"):
            done = move.to.ledger.done > part.epoch
            yield move._replace(to=move.to._replace(spool=s.spool - {part[:2]})) if done else move

    # ---- requests

    def send(self, s: State, d: Driver, request: Request, to: Mapping[str, str], *lost: str, **more: Any) -> Moves:
        """Yield what a request leads to, by its answer; and the steps ``lost``, to one of which a lost reply leads.

        ``more`` of the driver changes if all goes well.
        """
        after, answer = self.apply(s, request)
        if request[0] == "append":
            if s.ledger.owner != d.generation and "owned" in self.rules:
                # the number is taken; the driver reads on, and finds the `take` of another
                yield step("fenced", s, d, to["fenced"])
                return
            more["known"] = after.ledger
        yield step(request[0], after, d, to[answer], **more if not answer else {})
        for then in lost:
            yield step(f"{request[0]}: reply lost", s.under_way(request), d, then, "reply lost")

    def apply(self, s: State, request: Request) -> tuple[State, str]:  # noqa: C901, PLR0911 - a case for each request
        """Return the state after a request has reached its place, and the answer."""
        prepared, (own, shared, mark, incarnation) = s.transactions.prepared, s.documents
        match request:
            case "prepare", part:
                return s.with_prepared(prepared | {part}), ""
            case "abort", part:
                harm = "ended what is recorded" if part in prepared and part in s.ledger.records else s.harm
                return s.with_prepared(prepared - {part})._replace(harm=harm), ""
            case "commit", part if part not in prepared:
                return s, "gone"
            case "commit", part:
                others = () if "accepted" in self.rules else {one for one in prepared if one[:2] == part[:2]} - {part}
                visible = (*s.transactions.visible, part, *others)
                return s.with_prepared(prepared.difference(visible), visible), ""
            case "write", epoch, attempt, rows:
                kept = [document for document in own if document[0] != epoch or "same id" not in self.rules]
                newest = max(epoch, shared) if "version" in self.rules else epoch
                written = Documents(tuple(sorted([*kept, (epoch, attempt, rows)])), newest, mark, incarnation)
                return s._replace(documents=written), ""
            case "mark", new, seen:
                same_index = incarnation == seen[1] or "incarnation" not in self.rules
                if not same_index or (mark not in (seen[0], new) and "mark replaced" in self.rules):
                    return s, "changed"
                return s._replace(documents=s.documents._replace(mark=new)), ""
            case "decide", epoch if epoch < s.commits:
                return s, "exists"
            case "decide", epoch:
                return s._replace(commits=epoch + 1, ever=s.ever | {(epoch, s.offsets[epoch])}), ""
            case _, kind, what:
                # it has taken the number of any other entry that is under way
                left = (one for one in s.late if one[0] != "append" or "number" not in self.rules)
                return s._replace(ledger=s.ledger.with_entry(kind, what), late=frozenset(left)), ""
        raise AssertionError(request)


# ---- faults


def faults(s: State) -> Moves:
    """Yield what may happen at any time, beside the replies that `Protocol.send` loses."""
    for d in s.drivers:
        yield Move("crash", s.put(d, None), "crash")
        if d.stream in ("vote", "record"):
            loser = s.part_of(d)._replace(copy=LOSER)
            yield Move("a losing task prepares", s.under_way(("prepare", loser)), "losing task")
    if len(s.drivers) == 1:
        yield Move("another driver starts", s.begun(), "another driver")
    for part in s.transactions.prepared:
        yield Move("a transaction times out", s.with_prepared(s.transactions.prepared - {part}), "time-out")
    yield from set_back(s)
    yield from restored(s)


def set_back(s: State) -> Moves:
    """Restore a target, or let it fail over, to before its newest epoch; later ones that are done go with that one."""
    prepared, visible = s.transactions
    for last in visible[-1:]:
        lost = s._replace(lost=s.lost | {("transactions", last.epoch)})
        kept = frozenset(part for part in prepared if not last.epoch < part.epoch < s.ledger.done)
        for still in (kept, prepared | {last}):
            yield Move("transactions are set back", lost.with_prepared(still, visible[:-1]), "set back")
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
    requests = frozenset(request for request in s.late if request[0] not in ("append", "decide"))
    s = s._replace(drivers=(), late=requests, restored=True)
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
    given_up = s.stopped == "transactions: the target is the older copy"
    wrong = {
        s.harm: bool(s.harm),
        f"stopped without a cause: {s.stopped}": bool(s.stopped) and not (s.restored or s.lost),
        "given up, and prepared": given_up and not s.transactions.prepared.isdisjoint(s.ledger.last_done),
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
