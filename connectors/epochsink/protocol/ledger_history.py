"""The ledger's entries, taken together: its owner, the pending epochs, the done ones.

A done epoch is kept as a summary: its attempt, and a digest of its input. Only of the newest few are the committables
kept, as evidence of a target that was set back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from epochsink.protocol.ledger_entries import (
    Abandoned,
    Disputed,
    Done,
    Entry,
    Prepared,
    Replay,
    Resolved,
    Skipped,
    Stopped,
    Summary,
    Take,
    Withdrawn,
)
from epochsink.protocol.progress import EpochProgress
from epochsink.sink import Committable, LastDone

DONE_IN_FULL: Final = 8
"""Done epochs whose committables are still known."""
RECEIPTS: Final = 64
"""Done epochs whose receipts are kept, for people: some 300 bytes for each sink in every summary."""


@dataclass(slots=True)
class LedgerHistory:
    """What the ledger records: the newest take, every retained epoch as last replayed, and which are done.

    ``applied`` has, for each sink, the newest done epoch in which it had rows: what its target must hold. ``receipts``
    are those of the newest done epochs, ``stopped`` is the last failure of a query.
    """

    owner: Take | None = None
    epochs: dict[int, Prepared] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    applied: dict[str, LastDone] = field(default_factory=dict)
    skipped: int = -1
    disputed: set[int] = field(default_factory=set)
    abandoned: Abandoned | None = None
    receipts: dict[int, EpochProgress] = field(default_factory=dict)
    stopped: Stopped | None = None

    @property
    def failing(self) -> Stopped | None:
        """The failure with which the driver stopped that took the ledger last; None if it runs, or ended well."""
        owner, stopped = self.owner, self.stopped
        if owner is None or stopped is None or owner.stamp is None or stopped.stamp is None:
            return None
        took, ended = owner.stamp, stopped.stamp
        same = (took.host, took.pid) == (ended.host, ended.pid)
        return stopped if same and took.at < ended.at else None

    @property
    def pending(self) -> list[Prepared]:
        """Recorded epochs that are not done, oldest first."""
        return [self.epochs[n] for n in sorted(self.epochs.keys() - self.done)]

    @property
    def newest(self) -> int:
        """The newest epoch that the ledger answers for, -1 if none."""
        return max(max(self.epochs, default=-1), self.skipped, self.owner.joined if self.owner else -1)

    def pending_of(self, sink: str) -> LastDone | None:
        """Return what a sink's target may hold beyond ``applied``: the oldest pending epoch in which it has rows."""
        return next((one.share_done(sink) for one in self.pending if sink in one.shares), None)

    def done_parts(self, sink: str) -> list[Committable]:
        """Return a sink's parts of the done epochs that are known in full."""
        full = [part for number in self.done if number in self.epochs for part in self.epochs[number].parts_of(sink)]
        # of the epochs before the take where it began to read, a driver knows each sink's newest one
        newest = self.applied[sink].parts if sink in self.applied else ()
        return [*full, *(part for part in newest if part not in full)]

    def copy(self) -> LedgerHistory:
        """Return a history that grows independently; entries never change, so both share them."""
        # each look at the ledger makes one: `replace` takes three times as long
        return LedgerHistory(
            self.owner,
            dict(self.epochs),
            set(self.done),
            dict(self.applied),
            self.skipped,
            set(self.disputed),
            self.abandoned,
            dict(self.receipts),
            self.stopped,
        )

    def summary(self, retained: int) -> Summary:
        """Return what a start has to know of all entries before the take that holds this."""
        done = sorted(self.done & self.epochs.keys())[-retained:]
        return Summary(
            pending=tuple(self.pending),
            done=tuple((number, self.epochs[number].attempt, self.epochs[number].offsets) for number in done),
            applied=dict(self.applied),
            skipped=self.skipped,
            disputed=tuple(sorted(self.disputed)),
            abandoned=self.abandoned,
            receipts=tuple(self.receipts.values()),
            stopped=self.stopped,
        )

    def forget(self, retained: int) -> None:
        """Keep at most ``retained`` done epochs."""
        for number in sorted(self.done)[:-retained]:
            self.done.discard(number)
            self.epochs.pop(number, None)

    def add(self, entry: Entry) -> None:
        """Take the next entry into account.

        Entries before the first take are remains of a prefix that is being removed, and are void.
        """
        match entry:
            case Take():
                if self.owner is None:
                    # of the first take that is read only: what later ones sum up has been read entry by entry
                    self._begin_with(entry.summary)
                self.owner = entry
            case _ if self.owner is None:
                return
            case Prepared():
                self.epochs[entry.epoch] = entry
                self.disputed.discard(entry.epoch)
            case Replay():
                self._replace(entry)
            case Resolved():
                self._close(entry)
            case Done():
                self.done.add(entry.epoch)
                self._finish(entry.epoch)
                self._keep_receipt(entry)
            case _:
                self._add_exception(entry)

    def _add_exception(self, entry: Entry) -> None:
        """Take into account what is not a step of an epoch: a user's mistake, an operator's decision."""
        match entry:
            case Skipped():
                self.skipped = max(self.skipped, entry.epoch)
            case Disputed():
                self.disputed.add(entry.epoch)
            case Withdrawn():
                self.epochs.pop(entry.epoch, None)
                self.disputed.discard(entry.epoch)
            case Abandoned():
                self.abandoned = entry
            case Stopped():
                self.stopped = entry

    def _keep_receipt(self, entry: Done) -> None:
        if entry.progress is not None:
            self.receipts[entry.epoch] = entry.progress
        for old in sorted(self.receipts)[:-RECEIPTS]:
            del self.receipts[old]

    def _begin_with(self, summary: Summary) -> None:
        for number, attempt, offsets in summary.done:
            self.epochs[number] = Prepared(number, attempt, offsets, {})
            self.done.add(number)
        for prepared in summary.pending:
            self.epochs[prepared.epoch] = prepared
        self.applied = dict(summary.applied)
        self.skipped = summary.skipped
        self.disputed = set(summary.disputed)
        self.abandoned = summary.abandoned
        self.receipts = {receipt.epoch: receipt for receipt in summary.receipts}
        self.stopped = summary.stopped

    def _finish(self, number: int) -> None:
        if (prepared := self.epochs.get(number)) is not None:
            for sink in prepared.shares:
                self._apply(sink, prepared.share_done(sink))
        # after `_apply`: what a target must hold is kept there, however old it gets
        for old in sorted(self.done & self.epochs.keys())[:-DONE_IN_FULL]:
            if self.epochs[old].shares:
                self.epochs[old] = replace(self.epochs[old], shares={})

    def _apply(self, sink: str, last: LastDone) -> None:
        known = self.applied.get(sink)
        # at the same epoch an operator's ruling, which names no parts, is the newer one and wins
        if known is None or known.epoch < last.epoch or (known.epoch == last.epoch and known.parts):
            self.applied[sink] = last

    def _replace(self, replay: Replay) -> None:
        for sink in replay.sinks:
            # a repair has prepared parts of a done epoch again
            if (last := self.applied.get(sink)) and last.epoch == replay.epoch and last.parts:
                self.applied[sink] = replace(last, parts=replay.parts)
        old = self.epochs.get(replay.epoch)
        if old is None:
            return
        again = {sink: replace(old.shares[sink], parts=replay.parts) for sink in replay.sinks if sink in old.shares}
        self.epochs[replay.epoch] = replace(old, shares={**old.shares, **again})

    def _close(self, resolved: Resolved) -> None:
        # from here on the operator's ruling counts, not what the target's marker says up to this epoch
        self._apply(resolved.sink, LastDone(resolved.epoch, "", ()))
        old = self.epochs.get(resolved.epoch)
        if old is not None:
            shares = {sink: share for sink, share in old.shares.items() if sink != resolved.sink}
            self.epochs[resolved.epoch] = replace(old, shares=shares)
