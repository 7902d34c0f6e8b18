"""What the stream thread and the commit thread ask of each other, by way of the coordinator that both use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.protocol.commit_queue import CommitQueue
    from epochsink.sink import CheckpointReader


class TwoThreads:
    """The coordinator's face to its two threads."""

    _queue: CommitQueue
    _checkpoint: CheckpointReader

    def wait_settled(self) -> None:
        """Wait until no earlier epoch is pending, so that at most one ever is; raises the commit thread's failure."""
        self._queue.wait_settled()

    def wait_pending(self, seconds: float) -> None:
        """Wait until an epoch is pending, for so many seconds at the most."""
        self._queue.wait_pending(seconds)

    def wait_run(self, seconds: float) -> None:
        """Wait until Spark has gone on to a later epoch than the oldest pending one, or so many seconds have passed."""
        self._queue.wait_run(seconds)

    def has_decided(self) -> bool:
        """Return whether a pending epoch is decided: its commit is under way or about to be."""
        pending = self.pending[:1]
        return bool(pending) and not self._queue.failed and self._checkpoint.has_commit(pending[0])

    def fail(self, failure: BaseException) -> None:
        """Remember the commit thread's failure for the stream thread."""
        self._queue.fail(failure)

    def raise_failure(self) -> None:
        """Raise the commit thread's failure, if there is one."""
        self._queue.raise_failure()

    @property
    def pending(self) -> Sequence[int]:
        """The recorded epochs that this run has yet to commit."""
        return self._queue.pending
