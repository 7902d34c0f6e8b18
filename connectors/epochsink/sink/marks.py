"""Compare the marks that a target holds with what the ledger says of it, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from epochsink.errors import WentBack, epochs
from epochsink.sink.values import Committable, LastDone

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


def marks_left(last: LastDone | None, name_of: Callable[[Committable], str] = lambda _: "") -> dict[str, Mark]:
    """Return the marks that an epoch leaves, by the names of its parts; by default one mark for all parts."""
    return {name_of(part): Mark(last.epoch, last.attempt) for part in last.parts} if last else {}


@dataclass(frozen=True, slots=True)
class Marks:
    """What a target itself says is applied of one sink's epochs, and what it must and may say; marks by part.

    ``target`` names the target in messages. ``found`` has the newest mark of each part. ``must`` has the marks that the
    done epoch has left, or those of joining if there is none yet; without those that may have expired. ``may`` has
    those that the pending epoch leaves. ``refusal`` says why the target is not the one that the epochs were written
    to, or may have lost rows although its marks agree. ``rows_tell``: whether rows show what is applied if marks are
    missing.
    """

    target: str
    found: Mapping[str, Mark]
    must: Mapping[str, Mark] = field(default_factory=dict)
    may: Mapping[str, Mark] = field(default_factory=dict)
    refusal: WentBack | None = field(default=None, compare=False)
    rows_tell: bool = False

    @property
    def newest(self) -> int | None:
        """The newest epoch that is applied; None if there is none."""
        return max((mark.epoch for mark in self.found.values() if mark.epoch >= 0), default=None)

    def verify(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` if there is a `disagreement`."""
        disagreement = self.disagreement(done, pending)
        if disagreement is not None:
            raise disagreement

    def disagreement(self, done: LastDone | None, pending: LastDone | None) -> WentBack | None:
        """Return how marks and ledger disagree; None if they agree.

        The target must hold ``done`` as it was recorded (None: the ledger has no epoch with rows), and nothing newer
        except parts of ``pending``.
        """
        newest = max((last.epoch for last in (done, pending) if last), default=-1)
        return self.refusal or self._ahead(newest) or self._gone(pending) or self._other(done, newest)

    def _ahead(self, newest: int) -> WentBack | None:
        for mark in self.found.values():
            if mark.epoch > newest:
                return _target_is_newer(self.target, mark, newest)
        return None

    def _gone(self, pending: LastDone | None) -> WentBack | None:
        for part in self.must.keys() - self.found.keys():
            if any(self.must[other].agrees(self.found.get(other)) for other in self.must):
                return _part_is_gone(self.target, self.must[part])
            gone = _marker_is_gone(self.target, self.must[part], pending)
            if self.rows_tell:
                gone.facts["lacks_from"] = 0
            return gone
        return None

    def _other(self, done: LastDone | None, newest: int) -> WentBack | None:
        for part, mark in self.found.items():
            wanted, allowed = self.must.get(part), self.may.get(part)
            # an operator accepted this epoch: the target may hold anything up to it
            if done and not done.parts and mark.epoch <= done.epoch:
                continue
            if mark.agrees(wanted) or mark.agrees(allowed):
                continue
            if wanted is not None and mark.epoch < wanted.epoch:
                return _target_is_older(self.target, mark, wanted)
            # between `done` and `pending` the ledger has no epoch with rows; marks of other parts may be older than
            # both
            if mark.epoch == newest or wanted is not None or mark.epoch > (done.epoch if done else -1):
                ours = next((one for one in (allowed, wanted) if one and one.epoch == mark.epoch), None)
                return _written_by_another(self.target, mark, ours)
        return None


ReadMarks = Callable[[str, LastDone | None, LastDone | None], Marks]
"""As `Participant.marks`."""


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
        f"the last commits), and the rows of {epochs(mark.epoch + 1, wanted.epoch)} are missing in it",
        hint="put the newer state back; or load the missing rows with a separate query (their input is in offsets/ of "
        f"the checkpoint), then accept the target: epochsink accept CHECKPOINT {wanted.epoch} --sink NAME",
        lacks_from=mark.epoch + 1,
    )


def _marker_is_gone(target: str, wanted: Mark, pending: LastDone | None) -> WentBack:
    done = f"epoch {wanted.epoch} is done" if wanted.epoch >= 0 else "it had joined"
    which = str(wanted.epoch) if wanted.epoch >= 0 else "none"
    if pending is None:
        hint = f"check that the rows up to epoch {which} are there, then accept the target: "
    else:
        hint = (
            f"check whether the rows of epoch {pending.epoch}, which is recorded, are there. If so: epochsink accept "
            f"CHECKPOINT {pending.epoch} --sink NAME; if they are not, and those of all earlier epochs are: "
        )
    return WentBack(
        f"{target} has no marker of this query any more, and the ledger says that {done}: the target "
        "was restored from a backup, or the marker was deleted; which epochs the target holds is unknown",
        hint=f"{hint}epochsink accept CHECKPOINT {which} --sink NAME",
    )


def _part_is_gone(target: str, wanted: Mark) -> WentBack:
    return WentBack(
        f"{target} has the markers of some parts of epoch {wanted.epoch}, which the ledger calls done, and lacks "
        "others: it has failed over to a standby that lacked the last commits, or markers were deleted",
        hint=f"put the newer state back; or check which rows of epoch {wanted.epoch} are there, load those that "
        f"are missing with a separate query, then accept the target: epochsink accept CHECKPOINT {wanted.epoch} "
        "--sink NAME",
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
