"""Record when each epoch of a checkpoint was recorded, when Spark decided it, and when the ledger called it done.

A look before and after every read makes the times exact: an epoch counts as undecided until the last look that did not
find its ``commits/N``.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spark_logs import OffsetEntry
from epochsink.protocol.storage import LocalStorage, Storage
from epochsink_devkit.history.history import HistoryLog


class CheckpointWatch:
    """Watches one checkpoint whose first source is Kafka. May be used by several threads.

    ``checkpoint`` is a folder of a local file system, or the files below one of another store.
    """

    def __init__(self, checkpoint: Path | Storage, run: str, log: HistoryLog) -> None:
        self._files = LocalStorage(checkpoint) if isinstance(checkpoint, Path) else checkpoint
        self._ledger = Ledger(self._files, "watch")
        self._run = run
        self._log = log
        self._lock = threading.Lock()
        self._last_look = 0.0
        self._planned: dict[int, dict[int, int]] = {}
        self._committed: set[int] = set()
        self._recorded: dict[int, str] = {}
        self._done: set[int] = set()

    def look(self) -> None:
        """Write events for all that is new since the last look."""
        with self._lock:
            began = time.monotonic()
            # List the commits first: the offsets of an epoch were written before it was decided.
            committed = [epoch for epoch in self._new("commits", self._committed) if self._decided(epoch)]
            for epoch in self._new("offsets", self._planned.keys()):
                self._plan(epoch)
            for epoch in committed:
                self._committed.add(epoch)
                self._log.write("committed", run=self._run, epoch=epoch, absent_until=self._last_look)
            begun = self._look_at_ledger()
            # If a checkpoint is copied here later, it holds epochs that an earlier look did not find.
            if begun or self._planned:
                self._last_look = began

    def decided(self) -> dict[int, int]:
        """Return the end offset of each source partition in the newest decided epoch."""
        with self._lock:
            return self._planned[max(self._committed)] if self._committed else {}

    @property
    def epochs(self) -> int:
        """The number of decided epochs seen so far."""
        return len(self._committed)

    def _new(self, folder: str, known: object) -> list[int]:
        seen = known if isinstance(known, set) else set(known)  # type: ignore[call-overload]
        return sorted(int(name) for name in self._files.names(folder) if name.isdigit() and int(name) not in seen)

    def _decided(self, epoch: int) -> bool:
        return bool(self._files.read(f"commits/{epoch}"))

    def _plan(self, epoch: int) -> None:
        ends = kafka_ends(self._files.read(f"offsets/{epoch}") or b"")
        if ends is not None:
            self._planned[epoch] = ends
            self._log.write("offsets", run=self._run, epoch=epoch, ends=ends)

    def _look_at_ledger(self) -> bool:
        """Write events for new ledger entries; return whether there is a ledger."""
        history = self._ledger.read()
        for epoch, prepared in sorted(history.epochs.items()):
            if self._recorded.get(epoch) != prepared.attempt:
                self._recorded[epoch] = prepared.attempt
                self._write_of(epoch, "recorded", absent_until=self._last_look)
        for epoch in sorted(history.done - self._done):
            self._done.add(epoch)
            self._write_of(epoch, "done")
        return history.owner is not None

    def _write_of(self, epoch: int, event: str, **facts: float) -> None:
        # Epochs in the ledger have been planned, perhaps after this look began.
        if epoch not in self._planned:
            self._plan(epoch)
        if epoch in self._planned:
            self._log.write(event, run=self._run, epoch=epoch, **facts)


def kafka_ends(data: bytes) -> dict[int, int] | None:
    """Return the end offsets in an entry of ``offsets/`` whose first source is one Kafka topic; None if it is torn.

    Raises `ValueError` for another kind of source.
    """
    try:
        (_, offset), *_others = OffsetEntry.parse("the entry", data).by_line()
        topics = json.loads(offset)
    except ValueError:
        return None
    if not isinstance(topics, dict) or len(topics) != 1 or not all(isinstance(ends, dict) for ends in topics.values()):
        raise ValueError(f"the offsets of this source are not those of one Kafka topic: {offset[:200]}")
    (ends,) = topics.values()
    return {int(part): int(end) for part, end in ends.items()}
