"""The durable record of prepared epochs: an append-only, fenced sequence of numbered files.

Entry number *i* is made by create-if-absent, so exactly one driver can write it. A driver appends only at the
number after the last entry that it has read; if that is taken it reads on, and another driver's `Take`
there means that it is superseded. So a driver that has lost the checkpoint cannot record anything, and there is no
gap between checking and writing. Nothing is overwritten. Files are removed only as a prefix long done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import ConfigurationError, Fenced, LedgerCorrupt, WentBack
from epochsink.protocol.ledger_entries import (
    Abandoned,
    Disputed,
    Done,
    Entry,
    Prepared,
    Replay,
    Resolved,
    Skipped,
    Take,
    Withdrawn,
    decode,
    encode,
    epoch_of,
    stamped,
)
from epochsink.sink import LastDone, sharers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.protocol.storage import Storage
    from epochsink.sink import Committable

FOLDER: Final = "epochsink/ledger"
RETAINED_EPOCHS: Final = 128
"""Done epochs whose entries stay, so that an older copy of the checkpoint is recognised."""
TRIMMED_AT_ONCE: Final = 64
_REMOVED_AT_ONCE: Final = 8
"""How many entries one call removes of those: more than an epoch adds."""


@dataclass(slots=True)
class History:
    """What the ledger says: the newest take, every retained epoch as last replayed, and which are done.

    ``applied`` has, for each sink, the newest done epoch in which it had rows: what its target must hold.
    """

    owner: Take | None = None
    epochs: dict[int, Prepared] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    applied: dict[str, LastDone] = field(default_factory=dict)
    skipped: int = -1
    disputed: set[int] = field(default_factory=set)
    abandoned: Abandoned | None = None

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
        """Return a sink's parts of all retained epochs that are done."""
        return [part for number in self.done if number in self.epochs for part in self.epochs[number].parts_of(sink)]

    def add(self, entry: Entry) -> None:
        """Take the next entry into account.

        Entries before the first take are remains of a prefix that is being removed, and count for nothing.
        """
        match entry:
            case Take():
                self.owner = entry
                for sink, last in entry.applied.items():
                    self._apply(sink, last)
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
            case _:
                self._add_exception(entry)

    def _add_exception(self, entry: Entry) -> None:
        """Take into account what is not a step of an epoch: a mistake of the query's user, an operator's word."""
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

    def _finish(self, number: int) -> None:
        prepared = self.epochs.get(number)
        for sink in prepared.shares if prepared else ():
            last = prepared.share_done(sink) if prepared else None
            if last is not None:
                self._apply(sink, last)

    def _apply(self, sink: str, last: LastDone) -> None:
        known = self.applied.get(sink)
        # at the same epoch an operator's word, which names no parts, is the newer one and stands
        if known is None or known.epoch < last.epoch or (known.epoch == last.epoch and known.parts):
            self.applied[sink] = last

    def _replace(self, replay: Replay) -> None:
        old = self.epochs.get(replay.epoch)
        if old is None:
            return
        shares = dict(old.shares)
        for lost, again in zip(old.shares[replay.sink].parts, replay.parts, strict=True):
            # a part that several sinks have recorded is one transaction: lost, and prepared again, for all of them
            for sink in sharers(lost, replay.sink):
                if sink in shares:
                    parts = tuple(again if part == lost else part for part in shares[sink].parts)
                    shares[sink] = replace(shares[sink], parts=parts)
        self.epochs[replay.epoch] = Prepared(old.epoch, old.attempt, old.offsets, shares)

    def _close(self, resolved: Resolved) -> None:
        # from here on the operator's word counts, not what the target's marker says up to this epoch
        self._apply(resolved.sink, LastDone(resolved.epoch, "", ()))
        old = self.epochs.get(resolved.epoch)
        if old is not None:
            shares = {sink: share for sink, share in old.shares.items() if sink != resolved.sink}
            self.epochs[resolved.epoch] = Prepared(old.epoch, old.attempt, old.offsets, shares)


class Ledger:
    """One driver's view of a checkpoint's ledger. ``driver`` (uuid) tells its takes from other drivers'.

    ``application`` is the driver's Spark application id, for people. ``even_abandoned`` lets it take a ledger that is
    closed: to go on with ending what it holds.

    Entries never change, so what has been read stays right, and two threads may use one ledger. Every method may
    raise OSError, after which an append may or may not have happened: the next driver reads it.
    """

    def __init__(
        self,
        files: Storage,
        driver: str,
        *,
        application: str = "",
        even_abandoned: bool = False,
        retained_epochs: int = RETAINED_EPOCHS,
        trimmed_at_once: int = TRIMMED_AT_ONCE,
    ) -> None:
        self._files = files
        self._driver = driver
        self._application = application
        self._even_abandoned = even_abandoned
        self._retained_epochs = retained_epochs
        self._trimmed_at_once = trimmed_at_once
        self._entries: dict[int, Entry] = {}
        self._end = 0
        self._trimmed_to = 0

    def read(self) -> History:
        """Read on to the newest entry and return the history, whoever owns it."""
        if self._end == 0 or (not self._read_on() and self._was_trimmed()):
            self._read_all()
        history = self.known()
        if history.owner is None and self._entries:
            raise _corrupt(max(self._entries), "no driver's take stands before it")
        return history

    def known(self) -> History:
        """Return the history as read last, own entries included: for what needs no newer one."""
        history = History()
        # a copy: the other thread may add and trim meanwhile
        entries = self._entries.copy()
        for number in sorted(entries):
            history.add(entries[number])
        return history

    def verify(self) -> History:
        """Return the history if this driver still owns the ledger; raises `Fenced` if another took it."""
        history = self.read()
        if history.owner is None or history.owner.driver != self._driver:
            raise Fenced(
                f"another driver has taken over this checkpoint ({_described(history.owner)}); this one stops and "
                "writes nothing more",
                hint="run one driver for each checkpoint; nothing is lost, the newer driver goes on",
            )
        return history

    def take(self, query_id: str, origins: Mapping[str, Mapping[str, Any]], joined: int) -> Take:
        """Become the owner; return the take, its generation one above the last, or `_first_generation`.

        Raises `WentBack` if the ledger belongs to another query id, `ConfigurationError` if an operator has closed it.
        """
        while True:
            history = self.read()
            owner = history.owner
            if owner is not None and owner.query_id != query_id:
                raise WentBack(
                    f"the ledger in this checkpoint belongs to query id {owner.query_id}, "
                    f"and the checkpoint's metadata says {query_id}",
                    hint="the file 'metadata' was deleted or the folder epochsink/ was copied from another "
                    "checkpoint: put the matching one back, or start with a new checkpoint folder",
                )
            # in the loop: whoever closes the ledger while this driver starts takes the number that this take wanted
            if history.abandoned is not None and not self._even_abandoned:
                raise _closed(history.abandoned)
            entry = Take(
                generation=owner.generation + 1 if owner else _first_generation(),
                driver=self._driver,
                query_id=query_id,
                # what an earlier take says wins: another driver may have come in between
                origins={**origins, **(owner.origins if owner else {})},
                joined=max(joined, owner.joined if owner else -1),
                applied=history.applied,
            )
            if self._create(self._end, entry):
                return entry

    def append(self, entry: Entry) -> None:
        """Append an entry; raises `Fenced`, without having written it, if another driver took over."""
        while not self._create(self._end, entry):
            self.verify()

    def trim(self) -> None:
        """Remove entries of epochs long done, as a prefix that ends before a take, when enough have gathered.

        A take says where the ledger begins, so that what a driver superseded long ago still writes where entries have
        been removed can never be taken for one. So the newest take is said again now and then.
        """
        history = self.verify()
        entries = self._entries.copy()
        takes = [number for number, entry in entries.items() if isinstance(entry, Take)]
        if history.owner is not None and self._end - max(takes) > self._retained_epochs:
            self.append(replace(history.owner, applied=history.applied))
        retained = set(sorted(history.done)[-self._retained_epochs :]) | (history.epochs.keys() - history.done)
        first = min(entries)
        needed = min((number for number, entry in entries.items() if epoch_of(entry) in retained), default=first)
        keep = max((number for number in takes if number <= needed), default=first)
        if keep - first >= self._trimmed_at_once:
            self._trimmed_to = keep
        # a few each time: the next epoch's vote waits for this; one after another: see `_was_trimmed`
        for number in range(first, min(self._trimmed_to, first + _REMOVED_AT_ONCE)):
            self._files.remove(_name(number))
            self._entries.pop(number, None)

    def _create(self, number: int, entry: Entry) -> bool:
        entry = stamped(entry, self._application)
        if not self._files.create(_name(number), encode(entry)):
            return False
        if self._is_stale(number):
            self._files.remove(_name(number))
            self._read_all()
            return False
        self._remember(number, entry)
        return True

    def _is_stale(self, number: int) -> bool:
        """Whether the number was free only because the entry that once stood there has been trimmed."""
        if number == 0:
            return any(name.isdigit() and int(name) > 0 for name in self._files.names(FOLDER))
        return self._was_trimmed(number)

    def _was_trimmed(self, number: int | None = None) -> bool:
        # entries go in ascending order: if the one before still stands, none after it was removed
        before = (self._end if number is None else number) - 1
        return not self._files.exists(_name(before))

    def _read_on(self) -> bool:
        # counted here, not in self._end, which the other thread moves on too
        number = start = self._end
        while (data := self._files.read(_name(number))) is not None:
            self._remember(number, _decoded(data, number))
            number += 1
        return number > start

    def _read_all(self) -> None:
        listed = {int(name) for name in self._files.names(FOLDER) if name.isdigit()}
        first = max(listed, default=0)
        # what stands below a gap is the leftover of a driver that wrote where entries had been trimmed; a listing
        # made while entries are added may leave some out, so each gap is looked at
        while first > 0 and (first - 1 in listed or self._files.exists(_name(first - 1))):
            first -= 1
        found = {}
        numbers = range(first, max(listed, default=-1) + 1)
        for number, data in zip(numbers, self._files.read_many([_name(each) for each in numbers]), strict=True):
            if data is not None:
                found[number] = _decoded(data, number)
        self._entries = found
        self._end = max(found, default=-1) + 1
        self._read_on()

    def _remember(self, number: int, entry: Entry) -> None:
        self._entries[number] = entry
        self._end = max(self._end, number + 1)


def _first_generation() -> int:
    """Return the generation that a ledger begins with: in seconds since 1970, so above those of any ledger before it.

    A ledger that was lost leaves transactions behind in the targets. With 1, they would be those of newer drivers,
    which no sweep touches, and would hold locks and readers for ever.
    """
    return int(time.time())


def _name(number: int) -> str:
    return f"{FOLDER}/{number:020d}"


def _described(take: Take | None) -> str:
    if take is None:
        return "its take is gone"
    since = f", since {take.stamp}" if take.stamp else ""
    return f"its generation is {take.generation}{since}"


def _closed(abandoned: Abandoned) -> ConfigurationError:
    return ConfigurationError(
        f"this checkpoint was abandoned ({abandoned.stamp or 'when is not known'}): its ledger is closed for good, and "
        "what it had prepared and Spark had not decided is ended",
        hint="start with a new checkpoint folder; 'epochsink status' on this one says from which offsets",
    )


def _decoded(data: bytes, number: int) -> Entry:
    try:
        return decode(data)
    except (ValueError, KeyError, TypeError) as broken:
        raise _corrupt(number, str(broken)) from broken


def _corrupt(number: int, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"ledger entry {number} ({_name(number)} in the checkpoint) cannot be used: {why}",
        hint="a newer epochsink may have written it: start with that version; otherwise restore the "
        "checkpoint folder, with its epochsink/ folder, from one and the same copy",
    )
