"""What the stream thread and the commit thread share: pending epochs, the first failure, and whose turn it is to sweep.

The stream thread adds recorded epochs and waits for them; the commit thread removes the committed ones. A sweep, a
replay and an attempt exclude one another, because a sweep ends whatever the ledger does not name, and what a replay or
an attempt has just prepared is not named yet. An attempt that was under way before a replay is *overtaken*: where rows
stand in the order in which they were written, its rows stand before those of the earlier epoch.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class CommitQueue:
    """Shared by exactly two threads. ``monitor`` guards it."""

    def __init__(self, monitor: threading.Condition | None = None) -> None:
        self._monitor = monitor or threading.Condition()
        self._pending: list[int] = []
        self._failure: BaseException | None = None
        self._occupied = False
        self._attempting = False
        self._overtaken = False
        self._running = -1

    @property
    def pending(self) -> tuple[int, ...]:
        """Recorded epochs that this run has yet to commit, oldest first."""
        return tuple(self._pending)

    def add(self, number: int) -> None:
        """Append a recorded epoch."""
        with self._monitor:
            self._pending.append(number)
            self._monitor.notify_all()

    def remove_first(self) -> None:
        """Remove the oldest pending epoch: it is committed."""
        with self._monitor:
            self._pending.pop(0)
            self._monitor.notify_all()

    def wait_settled(self) -> None:
        """Wait until no epoch is pending; raises the commit thread's failure."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._pending or self._failure is not None)
        self.raise_failure()

    def run_epoch(self, number: int) -> None:
        """Say which epoch Spark runs now: it has decided those before it."""
        with self._monitor:
            self._running = number
            self._monitor.notify_all()

    @property
    def running(self) -> int:
        """The epoch that Spark runs, or ran last."""
        return self._running

    def wait_run(self, seconds: float) -> None:
        """Wait until Spark runs an epoch after the oldest pending one, for so many seconds at the most."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._pending or self._running > self._pending[0], seconds)

    def wait_pending(self, seconds: float) -> None:
        """Wait until an epoch is pending, for so many seconds at the most."""
        with self._monitor:
            self._monitor.wait_for(lambda: bool(self._pending), seconds)

    def fail(self, failure: BaseException) -> None:
        """Remember the first failure, and wake whoever waits."""
        with self._monitor:
            # the first one: what comes after it is mostly its consequence
            self._failure = self._failure or failure
            self._monitor.notify_all()

    @property
    def failed(self) -> bool:
        """Whether there is a failure."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def begin_attempt(self) -> None:
        """Wait for the end of a sweep or a replay; from here on `alone_if_idle` says no."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._occupied)
            # under the monitor, where alone_if_idle looks at it: no sweep begins from here on
            self._attempting = True
            self._overtaken = False

    def end_attempt(self) -> None:
        """Say that the attempt is recorded or ended."""
        with self._monitor:
            self._attempting = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nothing else sweeps or replays, and keep it so."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._occupied)
            self._occupied = True
        try:
            yield
        finally:
            self._vacate()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Like `alone`, for a replay: the attempt under way is overtaken by it."""
        with self.alone():
            # before anything is prepared again: a vote that ends meanwhile has to see it
            self._overtaken = True
            yield

    @property
    def overtaken(self) -> bool:
        """Whether an earlier epoch was prepared again since the attempt under way began."""
        return self._overtaken

    @contextmanager
    def alone_if_idle(self) -> Iterator[bool]:
        """Like `alone`, without waiting: give False if an epoch is pending, an attempt under way, or all has failed."""
        with self._monitor:
            idle = not (self._pending or self._attempting or self._occupied or self.failed)
            self._occupied = self._occupied or idle
        try:
            yield idle
        finally:
            if idle:
                self._vacate()

    def _vacate(self) -> None:
        with self._monitor:
            self._occupied = False
            self._monitor.notify_all()
