"""What ledger, checkpoint and spool say about a query now. Reads only: safe beside a running driver."""

from __future__ import annotations

import enum
import shlex
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from epochsink.cli.abandon import successor
from epochsink.errors import LedgerCorrupt
from epochsink.protocol.checkpoint import NOTHING_DECIDED
from epochsink.protocol.ledger import Ledger, survey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger import Damage
    from epochsink.protocol.ledger_entries import Abandoned, Prepared, Stamp, Take
    from epochsink.protocol.ledger_history import History


class State(enum.StrEnum):
    """How far an epoch has come."""

    RECORDED = "recorded"
    DECIDED = "decided"
    DONE = "done"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """One recorded epoch. ``parts`` counts what each sink commits on its own; a sink without rows is absent.

    Of older done epochs the ledger keeps no parts: ``parts`` is empty then, as for an epoch without any rows.
    """

    number: int
    attempt: str
    state: State
    parts: Mapping[str, int]
    spooled_bytes: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A spooled attempt that the ledger does not name: one under way, or one that died."""

    number: int
    attempt: str
    spooled_bytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """A query's state. ``newest_recorded``, ``newest_decided`` and ``newest_begun`` are -1 for none."""

    checkpoint: str
    spool: str
    query_id: str
    owner: Take | None
    newest_recorded: int
    newest_decided: int
    newest_begun: int
    epochs: Sequence[EpochStatus]
    leftovers: Sequence[Leftover]
    abandoned: Abandoned | None
    successor: str
    damage: Sequence[str] = ()

    @property
    def sinks(self) -> list[str]:
        """Return the names of all sinks that ever joined."""
        return sorted(self.owner.origins) if self.owner else []

    @property
    def spooled_bytes(self) -> int:
        """Return the size of the whole spool."""
        return sum(epoch.spooled_bytes for epoch in self.epochs) + sum(left.spooled_bytes for left in self.leftovers)

    def in_state(self, state: State) -> list[int]:
        """Return the epochs in a state, oldest first."""
        return [epoch.number for epoch in self.epochs if epoch.state is state]

    def advice(self) -> list[str]:
        """Return what it means and what to do, a sentence each."""
        if self.damage:
            return [*self.damage, _DAMAGED]
        if self.owner is None:
            return ["no ledger: epochsink has not run on this checkpoint, or the folder epochsink/ is lost"]
        if self.abandoned is not None:
            return [f"abandoned ({self.abandoned.stamp}): the ledger is closed, no query starts here; {self.successor}"]
        advice = []
        if self.newest_decided > self.newest_recorded:
            advice.append(
                f"Spark has decided epoch {self.newest_decided} and the ledger ends at {self.newest_recorded}: the "
                "ledger is an older copy, or the function did not pass these epochs on; restore the folder epochsink/ "
                "from the copy that the rest came from, or load what is missing and type: epochsink accept "
                f"{shlex.quote(self.checkpoint)} {self.newest_decided}"
            )
            return advice
        if decided := self.in_state(State.DECIDED):
            advice.append(
                f"epoch {_join(decided)} is decided and not yet committed everywhere: a running query does it now; "
                f"otherwise start the query, or: epochsink recover {shlex.quote(self.checkpoint)} "
                "--sinks MODULE:ATTRIBUTE"
            )
        if recorded := self.in_state(State.RECORDED):
            advice.append(
                f"epoch {_join(recorded)} is recorded and not decided: Spark runs it again at the next start, and the "
                "recorded attempt stands"
            )
        if self.newest_begun > max(self.newest_recorded, self.newest_decided):
            advice.append(
                f"epoch {self.newest_begun} has begun and is not recorded: a query is writing it now, or it failed; "
                "no row of it is visible, and the next start writes it again"
            )
        if not self.in_state(State.DECIDED):
            advice.append("everything decided is committed")
        return advice

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return {
            "checkpoint": self.checkpoint,
            "query_id": self.query_id,
            "generation": self.owner.generation if self.owner else None,
            "driver": self.owner.driver if self.owner else None,
            "taken": _stamp(self.owner.stamp) if self.owner else None,
            "abandoned": _stamp(self.abandoned.stamp) if self.abandoned else None,
            "sinks": self.sinks,
            "newest_recorded": self.newest_recorded,
            "newest_decided": self.newest_decided,
            "newest_begun": self.newest_begun,
            "epochs": [
                {
                    "epoch": epoch.number,
                    "attempt": epoch.attempt,
                    "state": epoch.state.value,
                    "parts": dict(epoch.parts),
                    "spooled_bytes": epoch.spooled_bytes,
                }
                for epoch in self.epochs
            ],
            "spool": {
                "place": self.spool,
                "bytes": self.spooled_bytes,
                "unrecorded": [
                    {"epoch": left.number, "attempt": left.attempt, "bytes": left.spooled_bytes}
                    for left in self.leftovers
                ],
            },
            "damage": list(self.damage),
            "advice": self.advice(),
        }


def read_status(place: Place) -> Status:
    """Read a checkpoint's status, as far as its ledger can be read."""
    # before the ledger: an epoch recorded meanwhile is then no leftover
    spooled = place.spool.attempts(place.query_id)
    history, damage = _history(place)
    named = {(prepared.epoch, prepared.attempt) for prepared in history.epochs.values()}
    return Status(
        checkpoint=place.location,
        spool=place.spool.root,
        query_id=place.query_id,
        owner=history.owner,
        newest_recorded=history.newest,
        newest_decided=max(place.checkpoint.newest_decided(), NOTHING_DECIDED),
        newest_begun=place.checkpoint.newest_begun(),
        epochs=[_epoch(place, history, history.epochs[number]) for number in sorted(history.epochs)],
        leftovers=[
            Leftover(epoch.number, epoch.attempt, place.spool.size(place.query_id, epoch))
            for epoch in sorted(spooled, key=lambda epoch: epoch.number)
            if (epoch.number, epoch.attempt) not in named
        ],
        abandoned=history.abandoned,
        successor=successor(history),
        damage=damage,
    )


_DAMAGED = (
    "no query starts on this ledger: restore the checkpoint folder, epochsink/ included, from one and the same copy; "
    "or start with the newer epochsink that wrote the entry. What is shown is what the other entries say"
)


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
    if prepared.epoch in history.done:
        return EpochStatus(prepared.epoch, prepared.attempt, State.DONE, parts, 0)
    if history.abandoned is not None:
        return EpochStatus(prepared.epoch, prepared.attempt, State.ENDED, parts, 0)
    state = State.DECIDED if place.checkpoint.is_decided(prepared.epoch) else State.RECORDED
    size = place.spool.size(place.query_id, prepared.at)
    return EpochStatus(prepared.epoch, prepared.attempt, state, parts, size)


def _stamp(stamp: Stamp | None) -> dict[str, Any] | None:
    return None if stamp is None else asdict(stamp)


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
