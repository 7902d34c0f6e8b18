"""What a start does with each combination of ledger, checkpoint and target, by the specification.

    PYTHONPATH=tests python -m model.state_table

prints the table of docs/explanation/protocol.md.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Final, NamedTuple

from model.specification import EPOCHS, Protocol
from model.state import Move, State

LAST: Final = EPOCHS - 1
LEDGERS: Final = ("nothing", "recorded", "done")
COMMITS: Final = ("no", "yes")
TARGETS: Final = ("nothing", "prepared", "visible")


class Held(NamedTuple):
    """What is stored of the newest epoch N; every epoch before it is done."""

    ledger: str
    commits: str
    target: str


class Outcome(NamedTuple):
    """What a start and the run after it do with epoch N, and how often a reader sees N in the end."""

    ends_leftover: bool = False
    writes: bool = False
    adopts: bool = False
    prepares_again: bool = False
    commits: bool = False
    older: str = ""
    """Which of the three is the older copy, if the query stops for that reason."""
    seen: int = 0


ROWS: Final = tuple(Held(*row) for row in product(LEDGERS, COMMITS, TARGETS))


def life() -> dict[str, State]:
    """Return the states in which epoch N of a run without faults is planned, prepared, recorded, visible, done."""
    state = State()
    moments: dict[str, State] = {}
    while not moments.get("done"):
        # the commit thread first: N begins when everything before it is done
        state = next_moves(state)[-1].to
        records = len(state.ledger.records)
        if len(state.offsets) == EPOCHS and state.ledger.done == LAST:
            moments.setdefault("planned", state)
        for moment, so in {
            "prepared": any(part.epoch == LAST for part in state.transactions.prepared),
            "recorded": records == EPOCHS,
            "visible": (state.documents.mark or (-1,))[0] == LAST,
            "done": state.ledger.done == EPOCHS,
        }.items():
            if so:
                moments.setdefault(moment, state)
    return moments


def next_moves(state: State) -> list[Move]:
    """Return the steps that are possible, without faults."""
    # of the sinks of this package, only PostgreSQL's repeat a commit that the target has lost
    return [move for move in Protocol(lacks="finished").moves(state) if not move.fault]


def composed(held: Held) -> State:
    """Return a state without a driver that has each part as it was at another moment."""
    moments = life()
    ledger = moments[{"nothing": "planned"}.get(held.ledger, held.ledger)]
    target = moments[{"nothing": "planned"}.get(held.target, held.target)]
    rows = moments["recorded"] if held.ledger == "recorded" or held.target == "prepared" else moments["planned"]
    return State(
        offsets=moments["planned"].offsets,
        commits=LAST + (held.commits == "yes"),
        ledger=ledger.ledger,
        spool=rows.spool if held.ledger != "done" else frozenset(),
        transactions=target.transactions,
        documents=target.documents,
        ever=moments["done"].ever,
    )


def outcome(held: Held) -> Outcome:
    """Follow a start, and the run after it, to its end."""
    state, names = composed(held), []
    while moves := next_moves(state):
        names.append(moves[-1].name)
        state = moves[-1].to
    prepared_again = any(part.epoch == LAST and part.copy for part in state.ledger.records)
    return Outcome(
        ends_leftover="abort" in names,
        writes="prepare" in names and not prepared_again,
        adopts="adopt" in names,
        prepares_again=prepared_again,
        commits="commit" in names and "it is committed" not in names,
        older=state.stopped.rpartition(": ")[2].removeprefix("the ").partition(" ")[0],
        seen=sum(part.epoch == LAST for part in state.transactions.visible),
    )


def sentence(held: Held, done: Outcome) -> tuple[str, str]:
    """Return an outcome in words: what a start does, and what a reader sees."""
    if done.older:
        seen = "N, once" if done.seen else "everything before N"
        return f"stops with `WentBack`: the {done.older} is the older copy", seen
    steps = [
        ("aborts what is prepared" if done.ends_leftover else ""),
        ("writes N; commits it when it is decided" if done.writes else ""),
        ("runs the plan of N for its state only" if done.adopts else ""),
        ("prepares N again from the spool" if done.prepares_again else ""),
        ("commits N" if done.commits and not done.writes else ""),
        ("records that N is done" if held.ledger == "recorded" and not done.commits else ""),
    ]
    return ", ".join(filter(None, steps)) or "nothing", "N, once"


def table() -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| ledger has of N | `commits/N` exists | target holds of N | a start | a reader sees in the end |",
        "|---|---|---|---|---|",
    ]
    for held in ROWS:
        start, seen = sentence(held, outcome(held))
        lines.append(f"| {held.ledger} | {held.commits} | {held.target} | {start} | {seen} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
