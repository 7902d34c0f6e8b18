"""How large a task's spooled rows may be to ride in its answer and in the ledger, in place of a file in the spool."""

from __future__ import annotations

from typing import Final

from epochsink.sink import falling_limit

TASK_BYTES: Final = 64 << 10
EPOCH_BYTES: Final = 256 << 10


def limit(told: int, partition: int) -> int:
    """Return how many bytes the task of a partition may carry for a sink, when `CarryLimit` tells so many.

    That rests on the epoch before, and this one may have any number of tasks; what they carry is one entry of the
    ledger, and in the driver's memory: for 1,000 tasks 4.2 MiB at most, for 10,000 tasks 6.5 MiB.
    """
    return min(told, falling_limit.limit(TASK_BYTES, partition))


class CarryLimit:
    """Shares what one entry of the ledger may carry among the tasks of an epoch, as many as the one before had.

    Nothing rides in a run's first epoch: nobody knows yet how many tasks there are. Nor after a failure, so that an
    epoch with many more tasks than the one before, if their answers are too much for the driver, passes when it runs
    again.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """For one task and sink."""

    def learn(self, answers: int) -> None:
        """Take in how many answers an epoch had: one for each task and sink with rows."""
        self.bytes = min(TASK_BYTES, EPOCH_BYTES // max(1, answers))

    def forget(self) -> None:
        """Begin again: an epoch has failed."""
        self.bytes = 0
