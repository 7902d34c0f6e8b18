"""Read the state of a query from ledger, checkpoint and spool. Changes nothing: safe beside a running driver."""

from __future__ import annotations

import enum
import shlex
import time
import uuid
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from epochsink.cli.abandon import successor
from epochsink.cli.orphans import lines_of
from epochsink.devkit import page
from epochsink.errors import LedgerCorrupt
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_damage import survey
from epochsink.protocol.retained import NOTHING_KEPT, Kept, Retention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.cli.targets import InTarget
    from epochsink.protocol.ledger_damage import Damage
    from epochsink.protocol.ledger_entries import Prepared, Stamp, Stopped
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.progress import EpochProgress


class State(enum.StrEnum):
    """How far an attempt at an epoch has come; UNRECORDED is one that is only spooled: under way, or dead."""

    UNRECORDED = "unrecorded"
    RECORDED = "recorded"
    DECIDED = "decided"
    DONE = "done"
    ENDED = "ended"


_WORDS: Final = {
    State.UNRECORDED: "not recorded: under way, or swept at the next start",
    State.RECORDED: "[yellow]recorded, not decided[/yellow]",
    State.DECIDED: "[red]decided, not committed[/red]",
    State.DONE: "[green]done[/green]",
    State.ENDED: "ended, never visible",
}


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """One attempt at an epoch. ``parts`` counts what each sink commits on its own; a sink without rows is absent.

    Of older done epochs the ledger keeps no parts: ``parts`` is empty then, as for an epoch without any rows.
    ``rows`` are the rows of each sink, as far as they are known, ``age_seconds`` is the time since the record, None if
    it is not recorded or not known. ``receipt`` is that of one of the newest done epochs.
    """

    epoch: int
    attempt: str
    state: State
    parts: Mapping[str, int]
    spooled_bytes: int
    rows: Mapping[str, int] = field(default_factory=dict)
    age_seconds: float | None = None
    receipt: EpochProgress | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A query's state, as ``--json`` prints it. Numbers of epochs are -1 for none; ``advice`` says what to do.

    ``headline`` says whether data is late and since when; ``late_seconds`` is the time since the record of the oldest
    epoch that is decided and not visible, 0 if there is none; ``open_seconds`` the time since Spark began the oldest
    epoch that is not visible. ``stopped`` is the last failure of a query, ``targets``
    what the targets say themselves, if they were asked. ``retained`` is what `epochsink repair` can apply again.
    """

    headline: str
    late_seconds: float
    open_seconds: float
    checkpoint: str
    query_id: str
    generation: int | None
    driver: str | None
    taken: Stamp | None
    abandoned: Stamp | None
    sinks: Sequence[str]
    newest_recorded: int
    newest_decided: int
    newest_begun: int
    epochs: Sequence[EpochStatus]
    spool: str
    stopped: Stopped | None
    damage: Sequence[str]
    advice: Sequence[str]
    targets: Sequence[InTarget] = ()
    retained: Kept = NOTHING_KEPT


def read_status(place: Place, typed: Sequence[str] = ()) -> Status:
    """Read a checkpoint's status, as far as its ledger can be read.

    ``typed`` are the options that were needed to open the place: the commands in the advice repeat them.
    """
    # before the ledger: an epoch recorded meanwhile is then no leftover
    spooled = place.spool.attempts(place.query_id)
    retention = Retention(place.spool, place.query_id)
    history, damage = _history(place)
    # after the spool: what became done meanwhile is among the retained ones by now
    recorded = {prepared.at for prepared in history.epochs.values()} | retention.terms().keys()
    epochs = [_epoch(place, history, prepared) for prepared in history.epochs.values()]
    epochs += [
        EpochStatus(at.number, at.attempt, State.UNRECORDED, {}, place.spool.size(place.query_id, at))
        for at in spooled
        if at not in recorded
    ]
    owner = history.owner
    late = max((one.age_seconds or 0.0 for one in epochs if one.state is State.DECIDED), default=0.0)
    under_way, open_seconds = (None, 0.0) if damage else _oldest_open(place, history)
    return Status(
        headline=_with_open(_headline(history, epochs, late, damage), under_way, 0.0 if late else open_seconds),
        late_seconds=late,
        open_seconds=open_seconds,
        checkpoint=place.location,
        query_id=place.query_id,
        generation=owner.generation if owner else None,
        driver=owner.driver if owner else None,
        taken=owner.stamp if owner else None,
        abandoned=history.abandoned.stamp if history.abandoned else None,
        sinks=sorted(owner.origins) if owner else [],
        newest_recorded=history.newest,
        newest_decided=place.checkpoint.newest_decided(),
        newest_begun=place.checkpoint.newest_begun(),
        epochs=sorted(epochs, key=lambda one: one.epoch),
        spool=place.spool.root,
        stopped=history.stopped,
        damage=damage,
        advice=[*damage, _DAMAGED] if damage else _advice(place, history, epochs, typed),
        retained=retention.kept(),
    )


def show(status: Status, epochs: int, console: Console) -> None:
    """Print a status with its newest ``epochs`` and every one that is pending."""
    ledger = f"generation {status.generation}, driver {status.driver}" if status.driver else "none"
    facts = [
        ("checkpoint", status.checkpoint),
        ("query id", status.query_id),
        ("ledger", ledger),
        ("taken", str(status.taken or "not known")),
        ("recorded", _up_to(status.newest_recorded)),
        ("decided", _up_to(status.newest_decided)),
        ("begun", _up_to(status.newest_begun)),
        ("spool", f"{decimal(sum(epoch.spooled_bytes for epoch in status.epochs))} in {status.spool}"),
    ]
    if (kept := status.retained).epochs:
        reach = f"back to epoch {kept.oldest}, done {_span(max(0.0, time.time() - kept.since))} ago"
        facts.append(("retained", f"{decimal(kept.size)}, {kept.epochs} epoch(s), {reach}"))
    if status.stopped is not None:
        facts.append(("last failure", f"{status.stopped.failure} ({status.stopped.stamp})"))
    # a terminal's width breaks no line: paths and commands are pasted
    console.print(status.headline, style="bold", markup=False, highlight=False, soft_wrap=True)
    for name, value in facts:
        console.print(Text.assemble((f"{name:<14}", "bold"), value), highlight=False, soft_wrap=True)
    table = Table(Column("epoch", justify="right"), "state", *status.sinks, Column("spool", justify="right"), "times")
    for index, epoch in enumerate(reversed(status.epochs)):
        if index >= epochs and epoch.state in (State.DONE, State.ENDED):
            continue
        # of an older done epoch the ledger keeps no parts, so none at all says nothing about rows
        absent = "" if not epoch.parts and epoch.state in (State.DONE, State.UNRECORDED) else "no rows"
        held = [_held(epoch, sink) or absent for sink in status.sinks]
        table.add_row(str(epoch.epoch), _WORDS[epoch.state], *held, decimal(epoch.spooled_bytes), _took(epoch))
    if table.row_count:
        console.print(table)
    for line in _in_targets(status):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in status.advice:
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)


def _in_targets(status: Status) -> Iterator[str]:
    for target in status.targets:
        sinks = ", ".join(target.sinks)
        if target.error:
            yield f"{sinks}: the target does not answer: {target.error}"
        elif not target.pending:
            yield f"{sinks}: nothing is pending in the target"
        for remnant in target.pending:
            name, *facts = lines_of(remnant)
            yield f"{sinks}: {name}"
            yield from facts


def page_of(status: Status) -> str:
    """Return a status as an HTML page: its headline, the newest done epochs as a picture and a table, the advice."""
    done = [epoch.receipt for epoch in status.epochs if epoch.receipt is not None]
    sections = [
        page.epochs_in_time(done) if done else ("No epoch is done yet", ""),
        ("What to do", "".join(f"<p>{escape(line)}</p>" for line in status.advice)),
    ]
    if status.stopped is not None:
        sections.append(("The last failure", f"<p>{escape(status.stopped.failure)} ({status.stopped.stamp})</p>"))
    sections.append(("Each epoch", page.epochs_table(done)))
    return page.document(f"epochsink: {status.checkpoint}", status.headline, sections)


def _held(epoch: EpochStatus, sink: str) -> str:
    if sink in epoch.rows:
        return f"{epoch.rows[sink]:,} row(s)"
    return f"{epoch.parts[sink]} part(s)" if sink in epoch.parts else ""


def _took(epoch: EpochStatus) -> str:
    """Return how long the steps of an epoch took, or how old it is."""
    done = epoch.receipt
    if done is None:
        return "" if epoch.age_seconds is None else f"recorded {_span(epoch.age_seconds)} ago"
    steps = {"write": done.write_seconds, "vote": done.record_seconds, "commit": done.commit_seconds}
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in steps.items())


def _span(seconds: float) -> str:
    """Return a time span as a person says it."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


SOON_SECONDS: Final = 5.0
"""Until then, a decided epoch that is not visible is no cause for concern."""
_SLOW_SECONDS: Final = 60.0
"""From here on, an epoch under way is what the headline begins with."""


def _headline(history: History, epochs: Sequence[EpochStatus], late: float, damage: Sequence[str]) -> str:
    """Return in one line whether data is late, and since when."""
    if damage:
        return "ATTENTION: the ledger is damaged, and no query starts on it; see below"
    if history.owner is None:
        return "no ledger yet"
    if history.abandoned is not None:
        return "abandoned: no query runs here any more"
    decided = _join([one.epoch for one in epochs if one.state is State.DECIDED])
    if decided:
        soon = f"epoch {decided} was decided just now: a running query commits it at this moment"
        since = f"LATE by {_span(late)}" if late else "LATE"
        is_late = f"{since}: epoch {decided} is decided and not visible in every sink; see below what to type"
        return soon if 0.0 < late < SOON_SECONDS else is_late
    newest = max(history.receipts, default=-1)
    if newest < 0:
        return "up to date: everything decided is visible"
    ago = _span(max(0.0, time.time() - history.receipts[newest].done_at))
    return f"up to date: everything decided is visible; epoch {newest} is the newest, {ago} ago"


def _oldest_open(place: Place, history: History) -> tuple[int | None, float]:
    """Return the oldest epoch that Spark has begun and that is not visible, and for how long; (None, 0) if none is."""
    if history.owner is None or history.abandoned is not None:
        return None, 0.0
    numbers = [prepared.epoch for prepared in history.pending]
    if (begun := place.checkpoint.newest_begun()) > max(history.newest, place.checkpoint.newest_decided()):
        numbers.append(begun)
    if not numbers:
        return None, 0.0
    since = place.checkpoint.begun_at(min(numbers))
    return min(numbers), 0.0 if since is None else max(0.0, round(time.time() - since, 3))


def _with_open(headline: str, epoch: int | None, seconds: float) -> str:
    """Return the headline with what it says of an epoch that takes long."""
    if seconds < SOON_SECONDS:
        return headline
    told = f"epoch {epoch} has been under way for {_span(seconds)}"
    if seconds < _SLOW_SECONDS:
        return f"{headline}; {told}"
    return f"SLOW: {told}: a target does not answer, the query is down, or epochs take as long; {headline}"


_DAMAGED: Final = (
    "no query starts on this ledger: restore the checkpoint folder, epochsink/ included, from one and the same copy; "
    "or start with the newer epochsink that wrote the entry. What is shown is what the other entries say"
)


def _advice(place: Place, history: History, epochs: Sequence[EpochStatus], typed: Sequence[str]) -> list[str]:
    """Return what the state means and what to do, a sentence each; a command has a line of its own."""
    if history.owner is None:
        return ["no ledger: epochsink has not run on this checkpoint, or the folder epochsink/ is lost"]
    if history.abandoned is not None:
        closed = f"abandoned ({history.abandoned.stamp}): the ledger is closed, no query starts here"
        return [f"{closed}; {successor(history)}"]
    newest = place.checkpoint.newest_decided()
    if newest > history.newest:
        older = (
            f"Spark has decided epoch {newest} and the ledger ends at {history.newest}: the ledger is an older copy, "
            "or the function did not pass these epochs on; restore the folder epochsink/ from the copy that the rest "
            "came from, or load what is missing and type:"
        )
        return [older, _command("accept", place.location, str(newest), *typed)]
    advice = []
    decided = [one.epoch for one in epochs if one.state is State.DECIDED]
    if decided:
        advice.append(
            f"epoch {_join(decided)} is decided and not yet committed everywhere: a running query does it now; "
            "otherwise start the query, or type:"
        )
        known = "--sinks" in typed
        advice.append(_command("recover", place.location, *([] if known else ["--sinks", _EXAMPLE]), *typed))
        if not known:
            advice.append(
                f"instead of {_EXAMPLE}, name the object that your pipeline starts, as MODULE:ATTRIBUTE: 'sink' in "
                "my_pipeline.py, an ExactlyOnce object or a dict of sinks"
            )
    recorded = [one.epoch for one in epochs if one.state is State.RECORDED]
    if recorded:
        advice.append(
            f"epoch {_join(recorded)} is recorded and not decided: Spark runs it again at the next start, and the "
            "recorded attempt stands"
        )
    if (begun := place.checkpoint.newest_begun()) > max(history.newest, newest):
        advice.append(
            f"epoch {begun} has begun and is not recorded: a query is writing it now, or it failed; no row of it is "
            "visible, and the next start writes it again"
        )
        if "--sinks" not in typed:
            advice.append("with --sinks MODULE:ATTRIBUTE, this command says whether its targets answer")
    return advice if decided else [*advice, "everything decided is committed"]


_EXAMPLE: Final = "my_pipeline:sink"


def _command(verb: str, *arguments: str) -> str:
    return f"    epochsink {verb} {shlex.join(arguments)}"


def _history(place: Place) -> tuple[History, list[str]]:
    """Return the ledger's history; if an entry is damaged, that of the others, and what is at stake."""
    try:
        return Ledger(place.files, uuid.uuid4().hex).read(), []
    except LedgerCorrupt as corrupt:
        history, damages = survey(place.files)
        return history, [_at_stake(place, damage) for damage in damages] or [corrupt.message]


def _at_stake(place: Place, damage: Damage) -> str:
    epochs = damage.epochs
    if not epochs:
        return str(damage)
    decided = [number for number in epochs if place.checkpoint.is_decided(number)]
    said = f"{damage}; epoch {' or '.join(map(str, epochs))} is at stake: "
    if not decided:
        return said + "Spark has not decided it, so nothing of it may be visible"
    return said + f"Spark has decided {_join(decided)}, so look whether its rows are in every target"


def _epoch(place: Place, history: History, prepared: Prepared) -> EpochStatus:
    parts = {sink: len(share.parts) for sink, share in prepared.shares.items()}
    size = 0
    if prepared.epoch in history.done:
        state = State.DONE
    elif history.abandoned is not None:
        state = State.ENDED
    else:
        state = State.DECIDED if place.checkpoint.is_decided(prepared.epoch) else State.RECORDED
        size = place.spool.size(place.query_id, prepared.at)
    receipt = history.receipts.get(prepared.epoch)
    if receipt is not None:
        rows = {sink: each.rows for sink, each in receipt.sinks.items()}
    else:
        rows = {sink: share.counted.rows for sink, share in prepared.shares.items() if share.counted.rows}
    age = None if prepared.stamp is None else max(0.0, round(time.time() - prepared.stamp.at, 3))
    return EpochStatus(prepared.epoch, prepared.attempt, state, parts, size, rows, age, receipt)


def _up_to(epoch: int) -> str:
    return "nothing" if epoch < 0 else f"up to epoch {epoch}"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
