"""The client's handle of a query on Spark Connect, whose end is the end of its commits."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

from pyspark.errors import PySparkException
from pyspark.sql.connect.streaming.query import StreamingQuery

from epochsink.errors import Addresses, EpochsinkError, UnsupportedQuery
from epochsink.spark.query_handle import failure_of

if TYPE_CHECKING:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql.connect.session import SparkSession

_log = logging.getLogger("epochsink")


class Settling(Protocol):
    """Waits for the commits of one query."""

    def settle(self, *, ended: bool) -> tuple[tuple[int, ...], str]:
        """Return which epochs are not visible yet, and why the run failed, "" if it did not."""


class ConnectQuery(StreamingQuery):
    """A streaming query whose end is the end of its commits."""

    def __init__(self, session: SparkSession, query: StreamingQuery, commits: Settling, addresses: Addresses) -> None:
        super().__init__(session, query.id, query.runId, query.name)
        self._commits = commits
        self._addresses = addresses
        self._settling = threading.Lock()

    def is_active_in(self, session: object) -> bool:
        """Return whether the query runs in a session; the server of another session is not asked."""
        return self._session is session and self.isActive

    def awaitTermination(self, timeout: int | None = None) -> bool | None:  # noqa: N802 - Spark's name
        """Wait for the query to end, and for its decided epochs to be visible.

        ``timeout`` in seconds is for the query alone. Raises the error of this package that ended the query, such as
        `RowsRejected`, else Spark's StreamingQueryException.
        """
        ended, failure = failure_of(partial(super().awaitTermination, timeout))
        if ended is not False:
            # a query that failed has decided epochs too
            self._finish(failure)
        return ended

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        """Wait until all input that is available now has been processed and is visible in the sinks."""
        _, failure = failure_of(super().processAllAvailable)
        if failure is not None:
            self._finish(failure)
        while self.isActive:
            pending, stopped = self._commits.settle(ended=False)
            if stopped:
                # not every version lets the process of the run stop it
                super().stop()
                raise EpochsinkError.from_words(stopped)
            if not pending:
                return
        self._finish(self.exception())

    @property
    def sinkProgress(self) -> NoReturn:  # noqa: N802 - in the manner of Spark's lastProgress
        """Refused: the commits run in the server."""
        refused = UnsupportedQuery(
            "the commits of a query on Spark Connect run in its server, and sinkProgress is not known here",
            hint="give ExactlyOnce on_progress=, which is called there, or type: epochsink status CHECKPOINT",
        )
        refused.address(self._addresses)
        raise refused

    def stop(self) -> None:
        """Stop the query, and wait until its decided epochs are visible."""
        super().stop()
        self._settle()

    def _finish(self, failure: StreamingQueryException | None) -> None:
        known = None if failure is None else EpochsinkError.from_text(str(failure))
        try:
            stopped = self._settle()
        except EpochsinkError as also:
            if failure is None:
                raise
            _log.error("the decided epochs of the query are not visible yet: %s", also)
            stopped = ""
        if known is not None:
            raise known
        if failure is not None:
            raise failure
        if stopped:
            raise EpochsinkError.from_words(stopped)

    def _settle(self) -> str:
        """Commit what the run has left; return why it failed, "" if it did not."""
        try:
            # one thread stops the query while another awaits its end: the second would see the first one's take of the
            # checkpoint, leave the commits to it and return before readers see them
            with self._settling:
                pending, stopped = self._commits.settle(ended=True)
        except PySparkException as lost:
            _log.warning(
                "the query has ended, and whether its last epoch is visible is not known, because the server of Spark "
                "Connect does not answer (%s): the next start, or sink.recover(spark), makes it so",
                lost,
            )
            return ""
        except EpochsinkError as failure:
            # the frames of the task that asked mean nothing here
            raise failure.fresh() from None
        if pending:
            _log.warning("epochs %s are decided and not visible: another driver has taken the checkpoint over", pending)
        return stopped
