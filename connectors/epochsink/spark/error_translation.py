"""Tell Spark that an epoch failed: with a short error, the sink's own if there is one; quietly after a stop().

Spark matches the text of what foreachBatch raises, with its traceback, with a regular expression. Its recursion
overflows the stream thread's stack if the text quotes a Java stack trace. So the long form goes only to the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from pyspark.errors import PySparkException

from epochsink.errors import Addresses, EpochsinkError, PrepareFailed
from epochsink.protocol.store_failure import remedy
from epochsink.spark.engine import Execution

_log = logging.getLogger("epochsink")

INTERRUPTED: Final = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling foreachBatch: java.lang.InterruptedException"
)
"""The only text by which Spark recognises that foreachBatch failed because of its own stop()."""


class StreamInterrupted(Exception):
    """The query was stopped while it prepared an epoch. The next start runs the epoch again."""


class FailedEpoch:
    """Why the newest epoch of a query failed; ``failure`` is None after one that did not.

    ``addresses`` completes the commands of errors. ``notes`` gives lines that are added to the error: epoch and source
    offsets. ``keep`` gets the failure as it is told. ``show_values`` lets errors and logs quote values of rows.
    """

    def __init__(
        self,
        addresses: Callable[[], Addresses],
        notes: Callable[[int], Sequence[str]],
        keep: Callable[[BaseException], None],
        *,
        show_values: bool,
    ) -> None:
        self._addresses = addresses
        self._notes = notes
        self._keep = keep
        self._show_values = show_values
        self.failure: Exception | None = None

    @contextmanager
    def told_to_spark(self, number: int, execution: Execution) -> Iterator[None]:
        """Make a short error of whatever fails in an epoch, and end the query with it.

        The query ends even if the user's function catches the error: otherwise Spark would decide the epoch.
        """
        try:
            yield
            self.failure = None
        except Exception as failure:  # noqa: BLE001 - whatever it is, Spark has to be told
            if not execution.is_active():
                _log.info("epoch %d was interrupted; nothing of it became visible", number)
                raise StreamInterrupted(INTERRUPTED) from None
            self.failure = error = self._told(failure, number)
            # the causes of our own errors may quote rows; of any other error the trace is the only information
            shown = failure if self._show_values or sinks_error(failure) is None else None
            _log.error("epoch %d failed; nothing of it became visible: %s", number, error, exc_info=shown)
            self._keep(error)
            execution.end_from_within(error)
            raise execution.raised(error) from None

    def _told(self, failure: Exception, number: int) -> Exception:
        """Return what Spark and the user are told: an error of this package, or the user's own error as it is."""
        known = sinks_error(failure)
        if known is None and not (isinstance(failure, OSError) or is_of_spark(failure)):
            return failure
        error = known.fresh() if known is not None else _unprepared(failure, number)
        if not self._show_values:
            error.hide_values()
        # the failure of an earlier epoch's commit has its notes; this epoch is not what failed
        if not error.notes:
            error.notes = (error.note_to_type,)
            # an unreadable checkpoint must not hide the failure
            with suppress(Exception):
                error.notes += tuple(self._notes(number))
        error.address(self._addresses())
        return error


def sinks_error(failure: BaseException) -> EpochsinkError | None:
    """Return the error of this package that a failure is, or that a task sent as text in it; else None."""
    if isinstance(failure, EpochsinkError):
        return failure
    if is_of_spark(failure):
        return EpochsinkError.from_text(str(failure))
    return None


def is_of_spark(failure: BaseException) -> bool:
    """Return whether Spark, or the way to its JVM, raised an error."""
    # by name: a client of Spark Connect has no py4j
    return isinstance(failure, PySparkException) or any(
        kind.__module__.partition(".")[0] == "py4j" for kind in type(failure).__mro__
    )


def is_of_lost_jvm(failure: BaseException | None) -> bool:
    """Return whether an error says that the JVM has ended."""
    return any(kind.__name__ == "Py4JNetworkError" for kind in type(failure).__mro__)


def _unprepared(failure: Exception, number: int) -> PrepareFailed:
    reason = reason_of(str(failure))[:1000]
    missing = "install it for the executors' Python too (PYSPARK_PYTHON). " if "ModuleNotFoundError" in reason else ""
    cause = remedy(failure, "")
    return PrepareFailed(
        f"epoch {number} could not be prepared: {reason}",
        hint=f"{missing}{f'{cause}, then start the query again; ' if cause else ''}the whole trace is in the driver's "
        "log (logger 'epochsink', level ERROR)",
    )


def reason_of(text: str) -> str:
    """Return the last line of a task's Python traceback, or the first lines of a Java exception."""
    _, traceback, tail = text.rpartition("Traceback (most recent call last):\n")
    ends = re.search(r"^\S.*", tail, re.MULTILINE) if traceback else None
    if ends is not None:
        return ends[0]
    return " | ".join([line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")][:3])
