"""Which rows Flink's retained checkpoints hold: what `CheckpointWatch` is for those of Spark.

A checkpoint is complete, and so decided, once it has a file ``_metadata``. In it lie the splits of the KafkaSource: a
topic's name, a partition, the next offset, and the offset to stop at, which an endless source has not.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from epochsink_devkit.history import HistoryLog

ENDLESS: Final = -(2**63)
SPLIT: Final = re.compile(rb"\x00.source-[a-z-]+(.{4})(.{8})" + re.escape(struct.pack(">q", ENDLESS)), re.DOTALL)
PARTITIONS: Final = 2


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its number, which grows from run to run, and where each source partition ends in it."""

    number: int
    folder: Path
    ends: dict[int, int]


def checkpoints(folder: Path, above: int = -1) -> Iterator[Checkpoint]:
    """Find complete checkpoints below a folder, of all jobs, with numbers above one."""
    for file in folder.glob("*/chk-*/_metadata"):
        number = int(file.parent.name.removeprefix("chk-"))
        if number <= above:
            continue
        try:
            splits = SPLIT.findall(file.read_bytes())
        except FileNotFoundError:
            # Flink has removed it meanwhile, as it has newer ones
            continue
        ends = {struct.unpack(">i", part)[0]: max(0, struct.unpack(">q", at)[0]) for part, at in splits}
        if len(ends) == PARTITIONS:
            yield Checkpoint(number, file.parent, ends)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint."""
    return max(checkpoints(folder), key=lambda one: one.number, default=None)


class FlinkWatch:
    """Writes into the history when each checkpoint was complete. May be used by several threads."""

    def __init__(self, folder: Path, run: str, log: HistoryLog) -> None:
        self._folder = folder
        self._run = run
        self._log = log
        self._lock = threading.Lock()
        self._last_look = 0.0
        self._newest: Checkpoint | None = None
        self.epochs = 0

    def look(self) -> None:
        """Write events for all that is new since the last look."""
        with self._lock:
            began = time.monotonic()
            above = self._newest.number if self._newest else -1
            for found in sorted(checkpoints(self._folder, above), key=lambda one: one.number):
                self._newest = found
                self.epochs += 1
                self._log.write("offsets", run=self._run, epoch=found.number, ends=found.ends)
                self._log.write("committed", run=self._run, epoch=found.number, absent_until=self._last_look)
            self._last_look = began

    def decided(self) -> dict[int, int]:
        """Return the end offset of each source partition in the newest complete checkpoint."""
        with self._lock:
            return self._newest.ends if self._newest else {}
