"""Compare the marks that a target holds with what the ledger says of it, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from epochsink.sink.values import LastDone

_NONE: Final[Mapping[str, Mark]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest epoch that a target itself says is applied, for one part, and the attempt that applied it.

    ``attempt`` is "" where the marker does not say: earlier versions of this package did not write it.
    """

    epoch: int
    attempt: str = ""

    def agrees(self, other: Mark | None) -> bool:
        """Whether both may mean the same attempt at the same epoch; one without attempt may mean any."""
        return (
            other is not None
            and self.epoch == other.epoch
            and (self.attempt == other.attempt or "" in (self.attempt, other.attempt))
        )


def verify_marks(
    target: str,
    found: Mapping[str, Mark],
    done: LastDone | None,
    pending: LastDone | None,
    marks_of: Callable[[LastDone], Mapping[str, Mark]],
    *,
    base: Mapping[str, Mark] = _NONE,
) -> None:
    """Raise `WentBack` unless a target's marks and the ledger agree: for `Participant.verify_applied`.

    ``found`` has the target's marks by part, ``marks_of`` returns those that an epoch leaves. ``base`` has those that
    the sink made when it joined, before its first epoch. ``target`` names the target in the message.
    """
    must = base if done is None else marks_of(done) if done.parts else {}
    may = marks_of(pending) if pending else {}
    newest = max((last.epoch for last in (done, pending) if last), default=-1)
    for part in found.keys() | must.keys():
        mark, wanted = found.get(part), must.get(part)
        if mark is None and any(must[other].agrees(found.get(other)) for other in must):
            raise _part_is_gone(target, must[part])
        if mark is None:
            raise _marker_is_gone(target, must[part], pending)
        # an operator accepted this epoch: the target may hold anything up to it
        if done and not done.parts and mark.epoch <= done.epoch:
            continue
        if mark.agrees(wanted) or mark.agrees(may.get(part)):
            continue
        if mark.epoch > newest:
            raise _target_is_newer(target, mark, newest)
        if wanted is not None and mark.epoch < wanted.epoch:
            raise _target_is_older(target, mark, wanted)
        # between `done` and `pending` the ledger has no epoch with rows; marks of other parts may be older than both
        if mark.epoch == newest or wanted is not None or mark.epoch > (done.epoch if done else -1):
            ours = next((one for one in (may.get(part), wanted) if one and one.epoch == mark.epoch), None)
            raise _written_by_another(target, mark, ours)


def _target_is_newer(target: str, mark: Mark, newest: int) -> WentBack:
    return WentBack(
        f"{target} already holds epoch {mark.epoch} of this query, and the ledger knows only epochs up to {newest}: "
        "the checkpoint is the older copy, or a driver on another copy of it is running",
        hint="stop the other driver, or restore the newer copy of the checkpoint; to process the input since then "
        "again, start with a new checkpoint folder after removing those epochs' rows",
    )


def _target_is_older(target: str, mark: Mark, wanted: Mark) -> WentBack:
    holds = f"epoch {mark.epoch} as the newest" if mark.epoch >= 0 else "no epoch"
    return WentBack(
        f"{target} holds {holds} of this query, and the ledger says that epoch {wanted.epoch} "
        "is done: the target is the older copy (restored from a backup, or failed over to a standby that lacked "
        f"the last commits), and the rows of epochs {mark.epoch + 1} to {wanted.epoch} are missing in it",
        hint="put the newer state back; or load those epochs' input with a query of its own, then say so: "
        f"epochsink accept CHECKPOINT {wanted.epoch} --sink NAME",
        lacks_from=mark.epoch + 1,
    )


def _marker_is_gone(target: str, wanted: Mark, pending: LastDone | None) -> WentBack:
    done = f"epoch {wanted.epoch} is done" if wanted.epoch >= 0 else "it had joined"
    which = str(wanted.epoch) if wanted.epoch >= 0 else "none"
    if pending is None:
        hint = f"look whether the rows up to epoch {which} are there; when they are, say so: "
    else:
        hint = (
            f"look whether the rows of epoch {pending.epoch}, which is recorded, are there. If so: epochsink accept "
            f"CHECKPOINT {pending.epoch} --sink NAME. If they are not, and those of all earlier epochs are: "
        )
    return WentBack(
        f"{target} has no marker of this query any more, and the ledger says that {done}: the target "
        "was restored from a backup, or somebody deleted the marker; which epochs it holds is unknown",
        hint=f"{hint}epochsink accept CHECKPOINT {which} --sink NAME",
    )


def _part_is_gone(target: str, wanted: Mark) -> WentBack:
    return WentBack(
        f"{target} has the markers of some parts of epoch {wanted.epoch}, which the ledger calls done, and lacks "
        "others: it has failed over to a standby that lacked the last commits, or somebody deleted markers",
        hint=f"put the newer state back; or look which rows of epoch {wanted.epoch} are there, load those that are "
        f"missing with a query of its own, then say so: epochsink accept CHECKPOINT {wanted.epoch} --sink NAME",
        lacks_from=wanted.epoch,
    )


def _written_by_another(target: str, mark: Mark, wanted: Mark | None) -> WentBack:
    ours = f"attempt {wanted.attempt}" if wanted else "no part of it there"
    return WentBack(
        f"epoch {mark.epoch} was applied to {target} by attempt {mark.attempt or 'unknown'}, and the ledger records "
        f"{ours}: a driver on another copy of this checkpoint writes for the same query",
        hint="stop the other driver, and keep the copy of the checkpoint whose ledger names that attempt "
        "(epochsink status CHECKPOINT --json)",
    )
