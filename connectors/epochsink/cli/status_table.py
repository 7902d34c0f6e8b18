"""A query's status as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Column, Table

from epochsink.cli.status import EpochStatus, State

if TYPE_CHECKING:
    from rich.console import Console

    from epochsink.cli.status import Status

_WORDS = {
    State.RECORDED: "[yellow]recorded, not decided[/yellow]",
    State.DECIDED: "[red]decided, not committed[/red]",
    State.DONE: "[green]done[/green]",
    State.ENDED: "ended, never visible",
}


def show(status: Status, epochs: int, console: Console) -> None:
    """Print a status with its newest ``epochs`` and every one that is pending."""
    facts = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    for name, value in _facts(status):
        facts.add_row(name, value)
    console.print(facts)
    listed = [
        epoch
        for index, epoch in enumerate(reversed(status.epochs))
        if index < epochs or epoch.state not in (State.DONE, State.ENDED)
    ]
    if listed:
        console.print(_table(listed, status))
    for leftover in status.leftovers:
        console.print(
            f"attempt {leftover.attempt} at epoch {leftover.number} is spooled ({decimal(leftover.spooled_bytes)}) and "
            "not recorded: under way, or swept at the next start"
        )
    for line in status.advice():
        console.print(line, style="bold", markup=False, highlight=False)


def _facts(status: Status) -> list[tuple[str, str]]:
    owner = status.owner
    return [
        ("checkpoint", status.checkpoint),
        ("query id", status.query_id),
        ("ledger", f"generation {owner.generation}, driver {owner.driver}" if owner else "none"),
        ("taken", str(owner.stamp) if owner and owner.stamp else "not known"),
        ("recorded", _up_to(status.newest_recorded)),
        ("decided", _up_to(status.newest_decided)),
        ("begun", _up_to(status.newest_begun)),
        ("spool", f"{decimal(status.spooled_bytes)} in {status.spool}"),
    ]


def _up_to(epoch: int) -> str:
    return "nothing" if epoch < 0 else f"up to epoch {epoch}"


def _table(epochs: list[EpochStatus], status: Status) -> Table:
    table = Table(Column("epoch", justify="right"), "state", *status.sinks, Column("spool", justify="right"))
    for epoch in epochs:
        # of an older done epoch the ledger keeps no parts, so none at all says nothing about rows
        absent = "no rows" if epoch.parts or epoch.state is not State.DONE else ""
        parts = [f"{epoch.parts[sink]} part(s)" if sink in epoch.parts else absent for sink in status.sinks]
        table.add_row(str(epoch.number), _WORDS[epoch.state], *parts, decimal(epoch.spooled_bytes))
    return table
