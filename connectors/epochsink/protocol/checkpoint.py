"""Read what Spark's checkpoint has decided, from ``metadata``, ``offsets/`` and ``commits/``; write nothing.

A file is named by its batch id. Spark purges ids more than ``spark.sql.streaming.minBatchesToRetain`` (100) behind the
newest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from epochsink.errors import EpochsinkError, UnsupportedQuery
from epochsink.protocol.spark_logs import COMMITS, FILES, OFFSETS, OffsetEntry
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import Storage

NOTHING_DECIDED = -1
_SOURCE_CHARACTERS: Final = 300
"""How much of a source's offsets an error quotes: of a topic with many partitions they are long."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A query's checkpoint, opened: its files, where it is, and the spool that goes with it."""

    files: Storage
    location: str
    spool: Spool


class Checkpoint:
    """A reader of one query's checkpoint. Every answer is read anew from the files, never from memory."""

    def __init__(self, files: Storage) -> None:
        self._files = files

    def query_id(self) -> str | None:
        """Return the query id, or None if no query has ever started on this checkpoint.

        Raises `EpochsinkError` if the file ``metadata`` cannot be understood.
        """
        data = self._files.read("metadata")
        try:
            return None if data is None else str(json.loads(data)["id"])
        except (ValueError, KeyError, TypeError) as broken:
            raise EpochsinkError(
                f"the file 'metadata' of the checkpoint, which holds the query's id, cannot be read: {broken}",
                hint="restore it from a copy of this checkpoint: with another id, it is another query",
            ) from broken

    def refuse_unknown_formats(self) -> None:
        """Raise `UnsupportedQuery` if the newest entries are of a version of Spark's logs that is not known."""
        if (decided := self.newest_decided()) != NOTHING_DECIDED:
            self.has_commit(decided)
        begun = self.newest_begun()
        # an empty file is a torn write: Spark itself says so
        if begun != NOTHING_DECIDED and self.has_offsets(begun):
            self.offsets_digest(begun)

    def has_commit(self, epoch: int) -> bool:
        """Return whether ``commits/<epoch>`` exists and is complete: an empty file is a torn write, not a decision.

        Raises `UnsupportedQuery` if its version is not known.
        """
        name = f"commits/{epoch}"
        data = self._files.read(name)
        if data:
            # a damaged entry decides as well: Spark wrote it after the epoch
            with suppress(ValueError):
                COMMITS.lines(name, data)
        return bool(data)

    def is_under_way(self, epoch: int) -> bool:
        """Return whether Spark has begun an epoch, and has not decided it."""
        return bool(self._files.read(f"offsets/{epoch}")) and not self.has_commit(epoch)

    def is_decided(self, epoch: int) -> bool:
        """Return whether an epoch is decided: its commit exists, or Spark purged it as older than all that exist."""
        return self.has_commit(epoch) or epoch < min(self._numbers("commits"), default=NOTHING_DECIDED)

    def newest_decided(self) -> int:
        """Return the newest decided epoch, or `NOTHING_DECIDED`."""
        return max(self._numbers("commits"), default=NOTHING_DECIDED)

    def newest_begun(self) -> int:
        """Return the newest epoch whose offsets Spark has written, or `NOTHING_DECIDED`."""
        return max(self._numbers("offsets"), default=NOTHING_DECIDED)

    def begun_at(self, epoch: int) -> float | None:
        """Return when Spark began an epoch, in seconds since 1970; None if it does not tell."""
        lines = (self._files.read(f"offsets/{epoch}") or b"").decode().splitlines()
        try:
            begun = json.loads(lines[1]).get("batchTimestampMs", 0) / 1000
        except (IndexError, ValueError):
            # a torn file: another method says what is damaged
            return None
        return begun or None

    def offsets_text(self, epoch: int) -> str:
        """Return the sources' offsets at the end of an epoch, as Spark has written them; for people."""
        return " ".join((self._files.read(f"offsets/{epoch}") or b"").decode(errors="replace").splitlines()[2:])

    def source_of(self, epoch: int) -> str:
        """Return from where to where an epoch reads its sources; for people."""
        begins, ends = (self.offsets_text(each)[:_SOURCE_CHARACTERS] for each in (epoch - 1, epoch))
        return f"{begins or 'the beginning'} to {ends}"

    def has_offsets(self, epoch: int) -> bool:
        """Return whether the checkpoint says what the input of an epoch is: Spark purges that of old epochs."""
        return bool(self._files.read(f"offsets/{epoch}"))

    def offsets_digest(self, epoch: int, *, durable: bool = False) -> str:
        """Return a digest of the input of an epoch: each source's offsets, and the watermark that it started with.

        The batch's wall-clock time is left out: Spark takes it anew when a restored checkpoint plans the same
        offsets again. If it is to be recorded (``durable``), a power cut must not remove the input that it describes:
        Spark would plan the epoch anew, with other offsets. Raises `EpochsinkError` if ``offsets/<epoch>``, or the log
        of a file source, cannot be read, and `UnsupportedQuery` if its version is not known.
        """
        name = f"offsets/{epoch}"
        with _named(name):
            offsets = OffsetEntry.parse(name, self._files.read(name) or b"")
        # part of the input: Spark drops rows that are later than it
        watermark = offsets.header.get("batchWatermarkMs", 0)
        if durable:
            self._files.make_durable(name)
        # for each line: the digests in ledgers are made so
        listed = [self._files_listed(*source, durable=durable) for source in offsets.by_line()]
        return hashlib.sha256(json.dumps([offsets.version, watermark, offsets.lines, listed]).encode()).hexdigest()

    def make_durable(self, epoch: int, *, offsets: bool) -> None:
        """Make an epoch's commit survive a power cut: on local disks, Spark itself does not.

        Otherwise a decision that readers already see could be undone, and its input be read again as another epoch. Its
        ``offsets`` too, unless this process has done so, by `offsets_digest`: another one may have written them anew.
        """
        for name in (f"offsets/{epoch}", f"commits/{epoch}") if offsets else (f"commits/{epoch}",):
            self._files.make_durable(name)

    def _files_listed(self, source: str, offset: str, *, durable: bool) -> list[str]:
        """Return the files that a file source took at an offset: the number of an entry in its own log.

        ``durable`` as in `offsets_digest`.
        """
        try:
            parsed = json.loads(offset)
        except ValueError:
            # a source that has no offset yet; other sources' formats are not ours to judge
            return []
        number = parsed.get("logOffset") if isinstance(parsed, dict) else None
        if not isinstance(number, int):
            return []
        folder = f"sources/{source}"
        name = f"{folder}/{number}"
        data = self._files.read(name)
        # Spark compacts every tenth entry with all before it, and deletes those later
        if data is None:
            name = f"{folder}/{self._compacted(folder, number)}.compact"
            data = self._files.read(name)
        if data is None:
            named = self._named_source() if source.isdigit() else ""
            return self._files_listed(named, offset, durable=durable) if named else []
        if durable:
            # the folder as well: Spark has made it for this query
            for each in (name, folder):
                self._files.make_durable(each)
        with _named(name):
            entries = [json.loads(line) for line in FILES.lines(name, data)[1:]]
            return sorted(str(entry["path"]) for entry in entries if entry["batchId"] == number)

    def _named_source(self) -> str:
        """Return the name of the source, "" if it has none: with named sources PySpark 4.2.0 writes version 1 too."""
        names = [name for name in self._files.names("sources") if not name.isdigit()]
        if len(names) > 1:
            raise UnsupportedQuery(
                f"version 1 of Spark's {OFFSETS.kind} does not say which of the sources {', '.join(sorted(names))} an "
                "offset is of: what the input of an epoch is cannot be told",
                hint=f"start on a new checkpoint after setting {OFFSETS.setting}=2",
            )
        return "".join(names)

    def _compacted(self, folder: str, number: int) -> int:
        """Return which compact file of a source's log holds an entry that has no file of its own."""
        stems = [name.removesuffix(".compact") for name in self._files.names(folder) if name.endswith(".compact")]
        return min((int(stem) for stem in stems if stem.isdigit() and int(stem) >= number), default=number)

    def _numbers(self, folder: str) -> list[int]:
        return [int(name) for name in self._files.names(folder) if name.isdigit()]


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as broken:
        raise EpochsinkError(
            f"{name} of the checkpoint is missing or cannot be read ({broken})",
            hint="the checkpoint is damaged: restore it from a copy, then start again",
        ) from broken
