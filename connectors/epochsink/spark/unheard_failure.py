"""A query whose first batch failed in us, and goes on: the function around us has swallowed the error.

There is no run yet, and so no commit thread, that would notice. Spark decides epochs that nobody has prepared.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from epochsink.sink import CheckpointReader
    from epochsink.spark.stream_execution import StreamExecution

_log = logging.getLogger("epochsink")

LOOK_SECONDS: Final = 0.25


class UnheardFailure(threading.Thread):
    """Ends the query with ``failure`` if Spark decides the epoch all the same; ends with the query."""

    def __init__(
        self,
        execution: StreamExecution,
        open_checkpoint: Callable[[], CheckpointReader],
        epoch: int,
        failure: BaseException,
    ) -> None:
        super().__init__(name="epochsink-unheard", daemon=True)
        self._execution = execution
        self._open_checkpoint = open_checkpoint
        self._checkpoint: CheckpointReader | None = None
        self._epoch = epoch
        self._failure = failure

    def run(self) -> None:
        """Watch until the query has ended."""
        while self._execution.is_alive():
            if self._is_decided():
                _log.error("epoch %d was decided although it failed: %s", self._epoch, self._failure)
                self._execution.fail(self._failure)
                return
            time.sleep(LOOK_SECONDS)

    def raise_unheard(self) -> None:
        """Wait for the query's end; raise the failure if Spark has decided the epoch."""
        self.join()
        if self._is_decided():
            raise self._failure

    def _is_decided(self) -> bool:
        try:
            # opened here: a store that fails would hide the failure that is to be reported
            self._checkpoint = self._checkpoint or self._open_checkpoint()
            return self._checkpoint.has_commit(self._epoch)
        except Exception as unread:  # noqa: BLE001 - whatever the store raises, Java's errors too
            _log.warning("the checkpoint cannot be read, and is read again: %s", unread)
            return False
