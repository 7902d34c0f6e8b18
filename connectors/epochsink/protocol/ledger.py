"""The durable record of prepared epochs: an append-only, fenced sequence of numbered files.

Entry number *i* is made by create-if-absent, so exactly one driver can write it. A driver appends only at the number
after the last entry that it has read, and only if the last `Take` that it has read is its own. If that number is taken,
it reads on; if it finds another driver's `Take`, it is superseded. So a driver that has lost the checkpoint cannot
record anything, and there is no gap between checking and writing. Nothing is overwritten. Files are removed only once a
later take sums them up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from epochsink.errors import ConfigurationError, Fenced, LedgerCorrupt, WentBack
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger_entries import Abandoned, Entry, Summary, Take, decode, encode, stamped
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.storage import Storage

FOLDER: Final = "epochsink/ledger"
ABANDON: Final = "epochsink abandon"
"""The purpose of a take that closes the ledger: no query starts afterwards."""
RETAINED_EPOCHS: Final = 128
"""Done epochs that stay known, so that an older copy of the checkpoint is recognised."""
SUMMARISED_AFTER: Final = 32
"""After how many entries the owner writes its take again, with a summary of all before it."""
_TAKES_KEPT: Final = 512
"""Drivers whose first take is kept: a driver that paused while more of them started does not find its successor's."""
_READ_BACK: Final = 16
_LISTINGS: Final = 8


class Ledger:
    """One driver's view of a checkpoint's ledger. ``driver`` (uuid) distinguishes its takes from other drivers'.

    ``application`` is the driver's Spark application id, for people. ``even_abandoned`` lets it take a closed ledger,
    to finish the clean-up. ``purpose`` is the command that takes it, "" for a query. ``retained_epochs`` done epochs
    stay known, and a start has to read at most ``summarised_after`` entries and the take before them.

    Entries never change, so what has been read stays right, and two threads may use one ledger. Every method may
    raise OSError. It is then unknown whether an append happened: the next driver reads it.
    """

    def __init__(
        self,
        files: Storage,
        driver: str,
        *,
        application: str = "",
        even_abandoned: bool = False,
        purpose: str = "",
        retained_epochs: int = RETAINED_EPOCHS,
        summarised_after: int = SUMMARISED_AFTER,
    ) -> None:
        self._files = files
        self._driver = driver
        self._application = application
        self._even_abandoned = even_abandoned
        self._purpose = purpose
        self._retained_epochs = retained_epochs
        self._summarised_after = summarised_after
        self._lock = threading.Lock()
        self._seen = _Seen(retained_epochs)
        self._uncertain = False

    def read(self) -> LedgerHistory:
        """Read on to the newest entry and return the history, whichever driver owns it."""
        self._catch_up()
        return self.known()

    def _catch_up(self) -> None:
        """Read on to the newest entry."""
        # a missing next number means "nothing new" only to the owner: for others its entry may have been removed
        if self._end == 0 or (
            not self._read_on() and not self._next_number_suffices() and self._exists_beyond(self._end - 1)
        ):
            self._read_all()
        with self._lock:
            if self._seen.history.owner is None and self._end > 0:
                raise _corrupt(self._end - 1, "no driver's take comes before it")

    def known(self) -> LedgerHistory:
        """Return the history as read last, own entries included, without asking the store."""
        with self._lock:
            return self._seen.history.copy()

    def own(self) -> LedgerHistory:
        """Like `known`; raises `Fenced` if another driver had taken the ledger when it was read last.

        That driver's history may have forgotten epochs that are pending for this one.
        """
        with self._lock:
            if self._is_owner():
                return self._seen.history.copy()
            raise _fenced(self._seen.history)

    def verify(self) -> LedgerHistory:
        """Return the history if this driver still owns the ledger; raises `Fenced` if another took it."""
        self._catch_up()
        return self.own()

    def take(
        self,
        query_id: str,
        origins: Mapping[str, Mapping[str, Any]],
        joined: int,
        *,
        above: int = 0,
        present: Collection[str] | None = None,
    ) -> Take:
        """Become the owner; return the take, its generation above the last one, the clock's and ``above``.

        ``present`` are the query's sinks; None if the caller writes no epoch. ``above`` is the highest generation that
        the targets of joining sinks hold: a lost ledger may have left transactions there, and a sweep does not end
        those of a newer generation.

        Raises `WentBack` if the ledger belongs to another query id, `ConfigurationError` if an operator has closed it.
        """
        while True:
            history = self.read()
            owner = history.owner
            if owner is not None and owner.query_id != query_id:
                raise _of_other_query(owner, f"the checkpoint's metadata says {query_id}")
            # in the loop: a command that closes the ledger while this driver starts takes the number of this take
            if history.abandoned is not None and not self._even_abandoned:
                raise _closed(history.abandoned)
            entry = Take(
                generation=max(owner.generation if owner else 0, _clock(), above) + 1,
                driver=self._driver,
                query_id=query_id,
                # those of an earlier take win: another driver may have taken the ledger in between
                origins={**origins, **(owner.origins if owner else {})},
                joined=max(joined, owner.joined if owner else -1),
                purpose=self._purpose,
                left=self._left(history, present),
                summary=Summary(),
            )
            if self._create_take(entry):
                return entry

    def _left(self, history: LedgerHistory, present: Collection[str] | None) -> Mapping[str, int]:
        """Return which sinks are no longer part of the query; a command neither removes nor adds sinks."""
        owner = history.owner
        if owner is None or present is None or self._purpose:
            return owner.left if owner else {}
        return {name: owner.left.get(name, history.newest) for name in owner.origins if name not in present}

    def append(self, entry: Entry) -> None:
        """Append an entry; raises `Fenced`, without having written it, if another driver took over."""
        # the number is taken by the other thread of this driver, which is no reason to stop, or by another driver
        while not self._create(self._own_end(), entry, owned=True):
            self._catch_up()

    def trim(self) -> None:
        """After many entries, write the take again with a summary of them, and remove what that replaces.

        Entries before the last take but one are removed, so a driver that is reading finds one of the two. The take by
        which a driver began is never removed. The driver before it has read up to that number and looks there next,
        however long it paused: one read shows whether the ledger is still its own, and no number at which it may
        append is ever free again.
        """
        if self._end - self._seen.summaries[1] <= self._summarised_after:
            return
        while not self._create_take():
            self._catch_up()
        # only now that the new summary exists: a start in between finds either
        with self._lock:
            gone = self._seen.replaced()
        self._files.remove_many([name_of(number) for number in gone])
        with self._lock:
            self._seen.present.difference_update(gone)

    def _own_end(self) -> int:
        """Return the number after the last entry that was read; raises `Fenced` if another driver took over by then.

        The other thread may have read that driver's entries: the number after them is free.
        """
        with self._lock:
            if self._is_owner():
                return self._end
            raise _fenced(self._seen.history)

    def _create_take(self, new: Take | None = None) -> bool:
        """Create a take with a summary of all before its number: it must not miss an entry appended meanwhile.

        None: this driver's own take again; raises `Fenced` if another driver took over.
        """
        with self._lock:
            number, history, owned = self._end, self._seen.history, self._is_owner()
            take = new or history.owner
            if take is None or not (new or owned):
                raise _fenced(history)
            takes = (*self._seen.takes, *([] if owned else [number]))[-_TAKES_KEPT:]
            summary = replace(history.summary(self._retained_epochs), takes=takes)
        return self._create(number, replace(take, summary=summary), owned=owned)

    def _create(self, number: int, entry: Entry, *, owned: bool) -> bool:
        entry = stamped(entry, self._application)
        try:
            is_new = self._files.create(name_of(number), encode(entry))
        except OSError:
            # the entry may exist all the same: the next look lists the folder, and does not rely on the next number
            self._uncertain = True
            raise
        if not is_new:
            return False
        if not owned and self._exists_beyond(number):
            # the number was free because its entry was removed, or other drivers have appended: take it at the end
            self._read_all()
            return False
        self._remember(number, entry)
        return True

    def _is_owner(self) -> bool:
        owner = self._seen.history.owner
        return owner is not None and owner.driver == self._driver

    def _next_number_suffices(self) -> bool:
        """Whether reading the next number finds everything new: a successor's first take is never removed from it."""
        with self._lock:
            return self._is_owner() and not self._uncertain

    def _exists_beyond(self, number: int) -> bool:
        return any(int(name) > number for name in self._files.names(FOLDER) if name.isdigit())

    @property
    def _end(self) -> int:
        return self._seen.end

    def _remember(self, number: int, entry: Entry) -> None:
        with self._lock:
            self._seen.add(number, entry)

    def _read_on(self) -> bool:
        # counted here, not in self._end, which the other thread moves on too
        number = start = self._end
        while (data := self._files.read(name_of(number))) is not None:
            self._remember(number, _decoded(data, number))
            number += 1
        return number > start

    def _read_all(self) -> None:
        for _ in range(_LISTINGS):
            listed = {int(name) for name in self._files.names(FOLDER) if name.isdigit()}
            entries = self._read_back_from(max(listed, default=-1))
            # otherwise the owner has summed up meanwhile, and removed what was listed
            if not listed or any(isinstance(entry, Take) for entry in entries.values()):
                break
        seen = _Seen(self._retained_epochs, end=min(entries, default=0))
        for number in sorted(entries):
            seen.add(number, entries[number])
        # those that were not read, too: a later trim removes them
        seen.present |= listed
        with self._lock:
            self._seen, self._uncertain = seen, False
        self._read_on()

    def _read_back_from(self, newest: int) -> dict[int, Entry]:
        """Read entries from the newest one back to a take, which sums up all before it.

        By number, not by the listing: a listing made while entries are added may lack some. Entries below a gap are
        void.
        """
        entries: dict[int, Entry] = {}
        while newest >= 0:
            numbers = range(newest, max(newest - _READ_BACK, -1), -1)
            contents = self._files.read_many([name_of(number) for number in numbers])
            for number, data in zip(numbers, contents, strict=True):
                if data is None:
                    return entries
                entries[number] = entry = _decoded(data, number)
                if isinstance(entry, Take):
                    return entries
            newest = numbers[-1] - 1
        return entries


@dataclass(slots=True)
class _Seen:
    """The entries up to ``end``, taken together, and their numbers.

    ``present`` are the numbers of files that exist, ``takes`` those of takes by which a driver began, ``summaries`` the
    two newest takes of all.
    """

    retained: int
    history: LedgerHistory = field(default_factory=LedgerHistory)
    end: int = 0
    present: set[int] = field(default_factory=set)
    takes: list[int] = field(default_factory=list)
    summaries: tuple[int, int] = (0, 0)

    def add(self, number: int, entry: Entry) -> None:
        # the other thread may have read what this one has just appended
        if number != self.end:
            return
        if isinstance(entry, Take):
            before = self.history.owner
            if before is None:
                self.takes = list(entry.summary.takes)
            elif before.driver != entry.driver:
                self.takes.append(number)
            self.summaries = (self.summaries[1], number)
        self.history.add(entry)
        self.history.forget(self.retained)
        self.present.add(number)
        self.end = number + 1

    def replaced(self) -> list[int]:
        """Return the numbers of files that no start needs any more."""
        return sorted(n for n in self.present - set(self.takes[-_TAKES_KEPT:]) if n < self.summaries[0])


def _clock() -> int:
    """Return the generation that a take is above, in milliseconds since 1970.

    So a ledger that was lost or restored from an older copy continues above the generation of every driver that took it
    since, even of one that prepares later. ``above`` protects a new ledger against a clock that was set back. Not in
    seconds: each start adds one, and there may be several in a second.
    """
    return int(time.time() * 1000)


def name_of(number: int) -> str:
    """Return the file of an entry."""
    return f"{FOLDER}/{number:020d}"


def _described(take: Take | None) -> str:
    if take is None:
        return "its take is gone"
    since = f", since {take.stamp}" if take.stamp else ""
    return f"its generation is {take.generation}{since}"


_START_ANEW: Final = (
    "start with a new checkpoint folder; from which offsets it has to read: epochsink status CHECKPOINT"
)


def _fenced(history: LedgerHistory) -> Fenced:
    owner, since = history.owner, _described(history.owner)
    stops = "this query stops and writes nothing more"
    if history.abandoned is not None or (owner is not None and owner.purpose == ABANDON):
        return Fenced(
            f"an operator has abandoned this checkpoint with 'epochsink abandon' ({since}); {stops}, and what it had "
            "prepared and Spark had not decided is ended",
            hint=_START_ANEW,
        )
    if owner is not None and owner.purpose:
        return Fenced(
            f"an operator has taken this checkpoint with '{owner.purpose}' ({since}); {stops}",
            hint="start the query again when that has ended; nothing is lost",
        )
    return Fenced(
        f"another driver has taken over this checkpoint ({since}); this one stops and writes nothing more",
        hint="run one driver for each checkpoint; nothing is lost, the newer driver continues",
    )


def begun_query(files: Storage) -> str | None:
    """Return the id of the query that has begun on a checkpoint; None if none has.

    Raises `WentBack` if the ledger has a query and the file ``metadata`` is gone. Spark 4.0 would write another one,
    for a new query; later versions refuse to start.
    """
    query_id = Checkpoint(files).query_id()
    if query_id is None and (owner := Ledger(files, "").read().owner) is not None:
        raise _of_other_query(owner, "the checkpoint has no file 'metadata'")
    return query_id


def _of_other_query(owner: Take, seen: str) -> WentBack:
    return WentBack(
        f"the ledger in this checkpoint belongs to query id {owner.query_id}, and {seen}",
        hint="the file 'metadata' was deleted or the folder epochsink/ was copied from another checkpoint: put the "
        "matching one back, or start with a new checkpoint folder",
    )


def _closed(abandoned: Abandoned) -> ConfigurationError:
    return ConfigurationError(
        f"this checkpoint was abandoned ({abandoned.stamp or 'when is not known'}): its ledger is closed for good, and "
        "what it had prepared and Spark had not decided is ended",
        hint=_START_ANEW,
    )


def _decoded(data: bytes, number: int) -> Entry:
    try:
        return decode(data)
    except (ValueError, KeyError, TypeError) as broken:
        raise _corrupt(number, str(broken)) from broken


def _corrupt(number: int, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(
        f"ledger entry {number} ({name_of(number)} in the checkpoint) cannot be used: {why}",
        hint="if a newer epochsink wrote it, start with that version or a later one; otherwise the file is damaged: "
        "restore the whole checkpoint folder, with epochsink/, from one copy",
    )
