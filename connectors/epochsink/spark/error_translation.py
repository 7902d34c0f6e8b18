"""Tell Spark that an epoch failed: short, with the sink's own error, and quiet if stop() was the cause.

Spark matches the text of what foreachBatch raises, traceback and all, with a regular expression whose recursion
overflows the stream thread's stack where that text quotes a Java stack trace. So the long form goes to the log alone.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochsink.errors import EpochsinkError, PrepareFailed
from epochsink.spark.compat import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from epochsink.spark.stream_execution import StreamExecution

_log = logging.getLogger("epochsink")


class StreamInterrupted(Exception):
    """The query was stopped while it prepared an epoch, which the next start runs again."""


class FailedEpoch:
    """Why the newest epoch of a query failed; ``failure`` is None after one that did not.

    ``notes`` gives the lines that are added to the error: epoch, source offsets, what to type. ``show_values`` lets
    errors and logs quote values of rows.
    """

    def __init__(self, notes: Callable[[int], Sequence[str]], *, show_values: bool) -> None:
        self._notes = notes
        self._show_values = show_values
        self.failure: Exception | None = None

    @contextmanager
    def told_to_spark(self, number: int, execution: StreamExecution) -> Iterator[None]:
        """Turn whatever fails in an epoch into a short error, and end the query with it.

        The query ends also if the user's function catches the error: else Spark would decide the epoch, and run on.
        """
        try:
            yield
            self.failure = None
        except Exception as failure:  # noqa: BLE001 - whatever it is, Spark has to be told
            if not execution.is_active():
                _log.info("epoch %d was interrupted; nothing of it became visible", number)
                raise StreamInterrupted(INTERRUPTED) from None
            self.failure = told = self._told(failure, number)
            # the causes of an error of ours may quote rows; of any other the trace is all that there is
            shown = failure if self._show_values or sinks_error(failure) is None else None
            _log.error("epoch %d failed; nothing of it became visible: %s", number, told, exc_info=shown)
            execution.end_from_within(told)
            raise told from None

    def _told(self, failure: Exception, number: int) -> Exception:
        """Return what Spark and the user are told: an error of this package, or the user's own error as it is."""
        known = sinks_error(failure)
        if known is None and not isinstance(failure, (Py4JError, PySparkException, OSError)):
            return failure
        told = known.fresh() if known is not None else _unprepared(failure, number)
        if not self._show_values:
            told.hide_values()
        # an unreadable checkpoint must not take the place of the failure
        with suppress(Exception):
            told.notes = tuple(self._notes(number))
        return told


def sinks_error(failure: BaseException) -> EpochsinkError | None:
    """Return the error of this package that a failure is, or that a task sent in the text of one; else None."""
    if isinstance(failure, EpochsinkError):
        return failure
    if isinstance(failure, (Py4JError, PySparkException)):
        return EpochsinkError.from_text(str(failure))
    return None


def _unprepared(failure: Exception, number: int) -> PrepareFailed:
    reason = reason_of(str(failure))[:1000]
    missing = "install it for the executors' Python too (PYSPARK_PYTHON). " if "ModuleNotFoundError" in reason else ""
    return PrepareFailed(
        f"epoch {number} could not be prepared: {reason}",
        hint=f"{missing}the whole trace is in the driver's log (logger 'epochsink', level ERROR)",
    )


def reason_of(text: str) -> str:
    """Return what a task's Python traceback ends in, else the first lines of a Java exception."""
    _, traceback, tail = text.rpartition("Traceback (most recent call last):\n")
    ends = re.search(r"^\S.*", tail, re.MULTILINE) if traceback else None
    if ends is not None:
        return ends[0]
    return " | ".join([line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")][:3])
