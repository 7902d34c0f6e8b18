"""What Spark is told when an epoch fails: short, with the sink's own error, and quiet where stop() was the cause.

Spark matches the text of what foreachBatch raises, traceback and all, with a regular expression whose recursion
overflows the stream thread's stack where that text quotes a Java stack trace. So the long form goes to the log alone.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from epochsink.errors import EpochsinkError, PrepareFailed
from epochsink.spark.compat import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink.spark.stream_execution import StreamExecution

_log = logging.getLogger("epochsink")


class StreamInterrupted(Exception):
    """The query was stopped while it prepared an epoch, which the next start runs again."""


@contextmanager
def told_to_spark(number: int, execution: StreamExecution) -> Iterator[None]:
    """Turn whatever fails in an epoch into what Spark can bear."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - whatever it is, Spark has to be told
        if not execution.is_active():
            _log.info("epoch %d was interrupted; nothing of it became visible", number, exc_info=failure)
            raise StreamInterrupted(INTERRUPTED) from None
        # the one place that has the whole trace: Spark gets a short form of it
        _log.error("epoch %d failed; nothing of it became visible", number, exc_info=failure)
        raise _brief(failure, number) from None


def sinks_error(failure: BaseException) -> EpochsinkError | None:
    """Return the error of this package that a failure is, or that a task sent in the text of one; else None."""
    if isinstance(failure, EpochsinkError):
        return failure
    if isinstance(failure, (Py4JError, PySparkException)):
        return EpochsinkError.from_text(str(failure))
    return None


def _brief(failure: Exception, number: int) -> Exception:
    known = sinks_error(failure)
    if known is not None:
        return known
    if not isinstance(failure, (Py4JError, PySparkException, OSError)):
        return failure
    reason = reason_of(str(failure))[:1000]
    missing = "install it for the executors' Python too (PYSPARK_PYTHON). " if "ModuleNotFoundError" in reason else ""
    return PrepareFailed(
        f"epoch {number} could not be prepared: {reason}",
        hint=f"{missing}nothing of the epoch became visible, and it is run again at the next start; the whole trace is "
        "in the driver's log (logger 'epochsink', level ERROR)",
    )


def reason_of(text: str) -> str:
    """Return what a task's Python traceback ends in, else the first lines of a Java exception."""
    _, traceback, tail = text.rpartition("Traceback (most recent call last):\n")
    ends = re.search(r"^\S.*", tail, re.MULTILINE) if traceback else None
    if ends is not None:
        return ends[0]
    return " | ".join([line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")][:3])
