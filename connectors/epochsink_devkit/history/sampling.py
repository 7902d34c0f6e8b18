"""Read a target repeatedly while faults happen, and once more after quiescence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import pyarrow as pa

from epochsink_devkit.history.history import CheckedTarget, HistoryLog
from epochsink_devkit.history.readers import TargetReader, TargetUnreachable

PAUSE_SECONDS: Final = 0.05
SLOW_SECONDS: Final = 2.0
"""A target whose read takes longer could not be looked at meanwhile, as one that cannot be reached."""

Result = TypeVar("Result")


class Sampler(threading.Thread):
    """One reader's thread. It calls ``look`` just before and just after the point in time that a read shows.

    See `epochsink_devkit.history.checkpoint_watch`. If consecutive reads are equal, only the first and the last are
    written, with the times of the others. Between reads it calls ``rest`` with the seconds that the last one took.
    """

    def __init__(
        self,
        target: CheckedTarget,
        reader: TargetReader,
        log: HistoryLog,
        look: Callable[[], None],
        rest: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(name=f"reads {target.name}", daemon=True)
        self._target = target
        self._reader = reader
        self._log = log
        self._look = look
        self._rest_after = rest
        self._took = 0.0
        self._ended = threading.Event()
        self._rows: pa.Table | None = None
        self._file = ""
        self._repeated: list[tuple[float, float]] = []
        self._unreachable_since: float | None = None
        self.failure: BaseException | None = None
        self.reads = 0
        """How often it has read, without the final read."""

    def run(self) -> None:
        """Read until `finish`."""
        try:
            while not self._ended.wait(PAUSE_SECONDS):
                if self._rest_after is not None:
                    self._rest_after(self._took)
                with suppress(TargetUnreachable):
                    self._sample()
        except BaseException as failure:  # noqa: BLE001 - raised by `finish`
            self.failure = failure

    def _sample(self, *, final: bool = False) -> None:
        self._look()
        began = time.monotonic()
        fixed: list[float] = []

        def look() -> None:
            fixed.append(time.monotonic())
            # Look before fetching the rows, which may take long: this read cannot show epochs decided in that time.
            self._look()

        try:
            rows = self._reader.read(look)
        except TargetUnreachable:
            self._unreachable_since = self._unreachable_since or began
            self._took = 0.0
            raise
        ended = time.monotonic()
        self._took = ended - began
        slow = self._took > SLOW_SECONDS
        if slow or self._unreachable_since is not None:
            since = began if self._unreachable_since is None else self._unreachable_since
            self._log.write("unreachable", target=self._target.name, began=since, ended=ended if slow else began)
            self._unreachable_since = None
        self.reads += not final
        if self._rows is not None and rows.equals(self._rows) and not final:
            self._repeated.append((began, fixed[-1]))
            return
        self._write_repeated()
        self._rows, self._file = rows, self._log.keep(rows)
        self._log.write_read(self._target.name, began, fixed[-1], self._file, final=final)

    def _write_repeated(self) -> None:
        if self._repeated:
            between = [began for began, _ in self._repeated[:-1]]
            self._log.write_read(self._target.name, *self._repeated[-1], self._file, between=between)
            self._repeated.clear()

    def finish(self, seconds: float) -> None:
        """End the thread, wait until the target is quiescent, then read once more and write its leftovers.

        Raises the error that ended the thread, and `TargetUnreachable` if the target cannot be read within ``seconds``.
        """
        self.stop()
        if self.failure is not None:
            raise self.failure
        deadline = time.monotonic() + seconds
        try:
            for kind, what in self._rest(deadline):
                self._log.write("leftover", target=self._target.name, kind=kind, what=what)
            self._until(deadline, lambda: self._sample(final=True))
        finally:
            self._reader.close()

    def stop(self) -> None:
        """End the thread, and close the reader's connection."""
        self._ended.set()
        if self.ident is not None:
            self.join()
        self._reader.close()

    def _rest(self, deadline: float) -> list[tuple[str, str]]:
        """Return the leftovers once there are none, or at the deadline."""
        while True:
            leftovers = self._until(deadline, self._reader.leftovers)
            if not leftovers or time.monotonic() > deadline:
                return leftovers
            time.sleep(PAUSE_SECONDS)

    @staticmethod
    def _until(deadline: float, attempt: Callable[[], Result]) -> Result:
        while True:
            try:
                return attempt()
            except TargetUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)
