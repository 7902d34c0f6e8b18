"""Steps 1 to 4 of the protocol, inside foreachBatch: prepare one epoch, in several attempts if a failure may pass."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from epochsink.errors import PrepareFailed
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.retry import retrying
from epochsink.spark.epoch_writer import EpochWriter
from epochsink.spark.error_translation import sinks_error
from epochsink.spark.query_plan import run_for_state
from epochsink.spark.running_query import RunningQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger("epochsink")

ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 5.0
"""How often an epoch is attempted before the query ends, and the longest first and later pauses between attempts."""

_UNIQUE_STATE: Final = 2
"""The first format of state checkpoints in which each run of a plan writes its own state."""


class EpochAttempts:
    """Prepares the epochs of one run, one after another."""

    def __init__(self, coordinator: Coordinator, writer: EpochWriter) -> None:
        self._coordinator = coordinator
        self._writer = writer
        self._recording = False

    def prepare(self, frame: DataFrame, number: int, query: RunningQuery) -> None:
        """Write an epoch, have the participants vote on it, and record it. Raises what made the last attempt fail."""
        self._coordinator.progress.opened(number)
        # Spark would commit the state of the first attempt beside the rows of a later one
        once = query.has_state and _keeps_first_state(frame.sparkSession)
        again = retrying(
            lambda failure: self._may_pass(failure, query),
            attempts=1 if once else ATTEMPTS,
            first_pause=FIRST_PAUSE_SECONDS,
            longest_pause=LONGEST_PAUSE_SECONDS,
        )
        again(self._attempt, frame, number)

    def _attempt(self, frame: DataFrame, number: int) -> None:
        self._recording = False
        # Spark plans while ledger and targets are asked
        with self._writer.planned(frame) as planned:
            # in each attempt, because it also ends what the attempt before has left
            settled = self._coordinator.settle(number)
        if settled is Plan.RUN_FOR_STATE:
            run_for_state(frame)
            self._coordinator.progress.closed(number)
            _log.info("epoch %d is recorded by an earlier attempt: its plan runs again for its state only", number)
            return
        epoch = self._coordinator.begin(number)
        try:
            written = self._writer.write(planned.result(), epoch)
        except BaseException:
            self._coordinator.abandon(epoch)
            raise
        self._recording = True
        self._coordinator.record(epoch, *written)

    def _may_pass(self, failure: BaseException, query: RunningQuery) -> bool:
        """Whether another attempt may succeed: a target was unreachable, or an earlier epoch is not committed yet.

        False if the sink says that it needs an operator, or if the record may have been written: only the next driver
        can read whether it was.
        """
        ours = sinks_error(failure) or failure
        passing = isinstance(ours, PrepareFailed) and ours.may_pass
        unread = isinstance(ours, OSError) and not self._recording
        if not (passing or unread) or not query.goes_on():
            return False
        self._coordinator.progress.retried()
        _log.warning("an attempt at an epoch failed, and may be repeated: %s", ours)
        return True


def _keeps_first_state(session: SparkSession) -> bool:
    """Return whether Spark keeps the state of the first run of a batch's plan, as in state checkpoint format 2."""
    return int(session.conf.get("spark.sql.streaming.stateStore.checkpointFormatVersion", "1") or 1) >= _UNIQUE_STATE
