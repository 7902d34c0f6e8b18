"""Read what Spark's checkpoint has decided, from ``metadata``, ``offsets/`` and ``commits/``; write nothing.

Format: Spark's HDFSMetadataLog. A file is named by its batch id; line 1 is ``v<version>``, line 2 JSON, and in
``offsets/`` each further line is one source's offset. Spark purges ids more than
``spark.sql.streaming.minBatchesToRetain`` (100) behind the newest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from epochsink.errors import EpochsinkError

if TYPE_CHECKING:
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
                hint="restore it from a copy of this very checkpoint: a query with another id is another query",
            ) from broken

    def has_commit(self, epoch: int) -> bool:
        """Return whether ``commits/<epoch>`` exists and is complete: an empty file is a torn write, not a decision."""
        return bool(self._files.read(f"commits/{epoch}"))

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
        return " ".join((self._files.read(f"offsets/{epoch}") or b"").decode().splitlines()[2:])

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
        offsets again. If it is to be recorded (``durable``), a power cut must not take away what it is of: Spark would
        plan the epoch anew, with other offsets. Raises `EpochsinkError` if ``offsets/<epoch>`` cannot be read.
        """
        name = f"offsets/{epoch}"
        data = self._files.read(name)
        try:
            version, header, *sources = (data or b"").decode().splitlines()
            # part of the input: Spark drops rows that are later than it
            watermark = json.loads(header).get("batchWatermarkMs", 0)
        except ValueError as broken:
            raise EpochsinkError(
                f"{name} of the checkpoint is missing or cannot be read ({broken})",
                hint="the checkpoint is damaged: restore it from a copy, then start again",
            ) from broken
        if durable:
            self._files.make_durable(name)
        listed = [self._files_listed(index, source, durable=durable) for index, source in enumerate(sources)]
        return hashlib.sha256(json.dumps([version, watermark, sources, listed]).encode()).hexdigest()

    def make_durable(self, epoch: int) -> None:
        """Make an epoch's offsets and its commit survive a power cut: on local disks, Spark itself does not.

        Otherwise a decision that readers already see could be undone, and its input be read again as another epoch.
        """
        for name in (f"offsets/{epoch}", f"commits/{epoch}"):
            self._files.make_durable(name)

    def _files_listed(self, source: int, line: str, *, durable: bool) -> list[str]:
        """Return the files that a file source took at an offset: the number of an entry in its own log.

        ``durable`` as in `offsets_digest`.
        """
        try:
            offset = json.loads(line)
        except ValueError:
            # "-" is the offset of a source that has none yet; other sources' formats are not ours to judge
            return []
        number = offset.get("logOffset") if isinstance(offset, dict) else None
        if not isinstance(number, int):
            return []
        folder = f"sources/{source}"
        name = f"{folder}/{number}"
        data = self._files.read(name)
        # Spark compacts every tenth entry with all before it, and deletes those later
        if data is None:
            name = f"{folder}/{self._compacted(folder, number)}.compact"
            data = self._files.read(name)
        if durable:
            # the folder as well: Spark has made it for this query
            for each in (name, folder):
                self._files.make_durable(each)
        entries = [json.loads(line) for line in (data or b"").decode().splitlines()[1:]]
        return sorted(str(entry["path"]) for entry in entries if entry["batchId"] == number)

    def _compacted(self, folder: str, number: int) -> int:
        """Return which compact file of a source's log holds an entry that has no file of its own."""
        stems = [name.removesuffix(".compact") for name in self._files.names(folder) if name.endswith(".compact")]
        return min((int(stem) for stem in stems if stem.isdigit() and int(stem) >= number), default=number)

    def _numbers(self, folder: str) -> list[int]:
        return [int(name) for name in self._files.names(folder) if name.isdigit()]
