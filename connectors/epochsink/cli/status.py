"""What ledger, checkpoint and spool say about a query now. Reads only: safe beside a running driver."""

from __future__ import annotations

import enum
import shlex
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.filesize import decimal
from rich.table import Column, Table

from epochsink.cli.abandon import successor
from epochsink.errors import LedgerCorrupt
from epochsink.protocol.ledger import Ledger, survey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger import Damage
    from epochsink.protocol.ledger_entries import Prepared, Stamp
    from epochsink.protocol.ledger_history import History


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
    """

    epoch: int
    attempt: str
    state: State
    parts: Mapping[str, int]
    spooled_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """A query's state, as ``--json`` prints it. Numbers of epochs are -1 for none; ``advice`` says what to do."""

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
    damage: Sequence[str]
    advice: Sequence[str]


def read_status(place: Place, typed: Sequence[str] = ()) -> Status:
    """Read a checkpoint's status, as far as its ledger can be read.

    ``typed`` are the options that were needed to open the place: the commands in the advice repeat them.
    """
    # before the ledger: an epoch recorded meanwhile is then no leftover
    spooled = place.spool.attempts(place.query_id)
    history, damage = _history(place)
    recorded = {(prepared.epoch, prepared.attempt) for prepared in history.epochs.values()}
    epochs = [_epoch(place, history, prepared) for prepared in history.epochs.values()]
    epochs += [
        EpochStatus(at.number, at.attempt, State.UNRECORDED, {}, place.spool.size(place.query_id, at))
        for at in spooled
        if (at.number, at.attempt) not in recorded
    ]
    owner = history.owner
    return Status(
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
        damage=damage,
        advice=[*damage, _DAMAGED] if damage else _advice(place, history, epochs, typed),
    )


def show(status: Status, epochs: int, console: Console) -> None:
    """Print a status with its newest ``epochs`` and every one that is pending."""
    facts = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    ledger = f"generation {status.generation}, driver {status.driver}" if status.driver else "none"
    for name, value in (
        ("checkpoint", status.checkpoint),
        ("query id", status.query_id),
        ("ledger", ledger),
        ("taken", str(status.taken or "not known")),
        ("recorded", _up_to(status.newest_recorded)),
        ("decided", _up_to(status.newest_decided)),
        ("begun", _up_to(status.newest_begun)),
        ("spool", f"{decimal(sum(epoch.spooled_bytes for epoch in status.epochs))} in {status.spool}"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    table = Table(Column("epoch", justify="right"), "state", *status.sinks, Column("spool", justify="right"))
    for index, epoch in enumerate(reversed(status.epochs)):
        if index >= epochs and epoch.state in (State.DONE, State.ENDED):
            continue
        # of an older done epoch the ledger keeps no parts, so none at all says nothing about rows
        absent = "" if not epoch.parts and epoch.state in (State.DONE, State.UNRECORDED) else "no rows"
        parts = [f"{epoch.parts[sink]} part(s)" if sink in epoch.parts else absent for sink in status.sinks]
        table.add_row(str(epoch.epoch), _WORDS[epoch.state], *parts, decimal(epoch.spooled_bytes))
    if table.row_count:
        console.print(table)
    for line in status.advice:
        # a terminal's width breaks no line: commands are pasted
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)


_DAMAGED: Final = (
    "no query starts on this ledger: restore the checkpoint folder, epochsink/ included, from one and the same copy; "
    "or start with the newer epochsink that wrote the entry. What is shown is what the other entries say"
)


def _advice(place: Place, history: History, epochs: Sequence[EpochStatus], typed: Sequence[str]) -> list[str]:
    """Return what the state means and what to do, a sentence each; a command stands on a line of its own."""
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
    return EpochStatus(prepared.epoch, prepared.attempt, state, parts, size)


def _up_to(epoch: int) -> str:
    return "nothing" if epoch < 0 else f"up to epoch {epoch}"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
