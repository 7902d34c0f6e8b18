"""Done epochs whose rows are kept for a while, so that a target that was set back can get them again.

The rows stay in the spool where the epoch was written. Beside them is a record of the epoch, made before the ledger
says that it is done, so that all rows that are kept have a record. The record's name says until when both stay, so that
a driver or a command without ``retain=`` keeps them too:

    <root>/<query id>/retained/<done>-<until>-<epoch>-<attempt>-<bytes>/<number>.json

The complete record with the highest number is valid.

The times are those of the driver's clock, in milliseconds since 1970.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Self

from epochsink.protocol.ledger_entries import Prepared, decode, encode
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.spool import Spool
from epochsink.sink import Committable, Epoch, LastDone


@dataclass(frozen=True, slots=True)
class Term:
    """From when until when an epoch is kept, in milliseconds since 1970, and the bytes of its rows: a record's name."""

    done: int
    until: int
    epoch: Epoch
    size: int

    def __str__(self) -> str:
        return f"{self.done}-{self.until}-{self.epoch.number}-{self.epoch.attempt}-{self.size}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the term that ``text`` names, or None."""
        match = re.fullmatch(r"(\d+)-(\d+)-(\d+)-([0-9a-f]{32})-(\d+)", text)
        if match is None:
            return None
        done, until, number, attempt, size = match.groups()
        return cls(int(done), int(until), Epoch(int(number), attempt), int(size))


@dataclass(frozen=True, slots=True)
class RetainedEpoch:
    """A done epoch whose rows are kept. ``after`` has what each of its sinks had to hold before it, if anything."""

    prepared: Prepared
    after: Mapping[str, LastDone]

    def replaced(self, part: Committable, again: Committable) -> RetainedEpoch:
        """Return the record with a part that was prepared again in place of the lost one."""
        return self.with_parts(
            {
                name: [again if each == part else each for each in share.parts]
                for name, share in self.prepared.shares.items()
            }
        )

    def with_parts(self, parts: Mapping[str, Sequence[Committable]]) -> RetainedEpoch:
        """Return the record with other parts of some sinks."""
        shares = {name: replace(self.prepared.shares[name], parts=tuple(some)) for name, some in parts.items()}
        return replace(self, prepared=replace(self.prepared, shares={**self.prepared.shares, **shares}))

    def to_bytes(self) -> bytes:
        """Return the content of the record."""
        after = {name: [last.epoch, last.attempt, last.parts] for name, last in self.after.items()}
        return json.dumps({"after": after}).encode() + b"\n" + encode(self.prepared)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Return what a record holds. Raises ValueError, KeyError, TypeError if it is not complete."""
        first, _, entry = content.partition(b"\n")
        prepared = decode(entry)
        if not isinstance(prepared, Prepared):
            raise TypeError(f"{type(prepared).__name__} is not an epoch")
        after = json.loads(first)["after"]
        return cls(prepared, {name: LastDone(at, by, tuple(parts)) for name, (at, by, parts) in after.items()})


@dataclass(frozen=True, slots=True)
class Kept:
    """What is retained, in all: for people. ``since`` is when the oldest was done, in seconds since 1970."""

    epochs: int = 0
    size: int = 0
    oldest: int = -1
    since: float = 0.0


NOTHING_KEPT: Final = Kept()


@dataclass(slots=True)
class Retention:
    """The retained epochs of one query. Every method may raise OSError.

    A done epoch is kept for as long as its record says, if it has rows for one of the sinks ``repaired``.
    """

    spool: Spool
    query_id: str
    repaired: Collection[str] = ()
    _known: dict[Epoch, Term] | None = field(default=None, init=False)

    def keep(self, prepared: Prepared, history: LedgerHistory) -> bool:
        """Keep an epoch that is about to be done; return whether its rows stay in the spool."""
        names = [name for name in prepared.shares if name in self.repaired]
        if not prepared.retain or not names:
            return False
        after = {name: history.applied[name] for name in names if name in history.applied}
        size = sum(file.size for share in prepared.shares.values() for file in share.files.values())
        now = time.time()
        new = Term(int(now * 1000), int((now + prepared.retain) * 1000), prepared.at, size)
        # a driver that died before "done" may have left one, perhaps a part of it: this one counts, unless its time is
        # over by now
        left = self.terms().get(prepared.at)
        if left is not None and left.until < new.done:
            self.spool.forget_retained(self.query_id, str(left))
            del self.terms()[prepared.at]
        term = self.terms().setdefault(prepared.at, new)
        self.spool.note_retained(self.query_id, str(term), RetainedEpoch(prepared, after).to_bytes())
        return True

    def terms(self) -> dict[Epoch, Term]:
        """Return what is kept, read once, then as this driver has changed it."""
        if self._known is None:
            terms = [term for name in self.spool.retained(self.query_id) if (term := Term.parse(name))]
            self._known = {term.epoch: term for term in terms}
        return self._known

    def kept(self) -> Kept:
        """Return what is retained, in all."""
        terms = list(self.terms().values())
        if not terms:
            return NOTHING_KEPT
        oldest = min(terms, key=lambda term: term.epoch.number)
        return Kept(len(terms), sum(term.size for term in terms), oldest.epoch.number, oldest.done / 1000)

    def expire(self, pending: Collection[Epoch]) -> None:
        """Drop what was kept for long enough, but for the recorded epochs ``pending``, which may need their rows."""
        now, known = time.time() * 1000, self.terms()
        # a list of its own: the other thread may keep an epoch meanwhile
        for term in [term for term in list(known.values()) if term.until < now and term.epoch not in pending]:
            # in this order: rows without a record are swept
            self.spool.forget_retained(self.query_id, str(term))
            self.spool.drop(self.query_id, term.epoch)
            known.pop(term.epoch, None)

    def rewrite(self, retained: RetainedEpoch) -> None:
        """Write the record of an epoch that is kept again, with parts that were prepared again."""
        term = self.terms()[retained.prepared.at]
        self.spool.note_retained(self.query_id, str(term), retained.to_bytes())

    def read(self, epoch: Epoch) -> RetainedEpoch | None:
        """Return the record of an epoch; None if it is not kept, or no record of it is complete."""
        term = self.terms().get(epoch)
        for content in () if term is None else self.spool.read_retained(self.query_id, str(term)):
            # a torn one is older than what was to follow it
            with suppress(ValueError, KeyError, TypeError):
                return RetainedEpoch.from_bytes(content)
        return None
