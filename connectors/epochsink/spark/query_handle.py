"""The handle of a query whose end is the end of its commits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from epochsink.protocol.commit_thread import is_committing, refuse_to_wait
from epochsink.protocol.progress import QueryProgress

_Waited = TypeVar("_Waited")


def failure_of(wait: Callable[[], _Waited]) -> tuple[_Waited | None, StreamingQueryException | None]:
    """Wait for a query; return the answer, and Spark's error, if it failed.

    What is raised after this is not printed with the hundreds of lines of Spark's error before it.
    """
    try:
        return wait(), None
    except StreamingQueryException as failure:
        return None, failure


class AwaitableCommits(Protocol):
    """Waits for the commits of a query, as `ExactlyOnce` does."""

    def await_committed(self) -> None:
        """Wait until the commits have ended. Raises what stopped them, or what made the newest epoch fail."""

    def await_commits(self) -> None:
        """Wait until the commits have ended. Raises what stopped them."""

    def await_settled(self) -> None:
        """Wait until every recorded epoch is committed. Raises what made a commit fail."""

    def progress(self) -> QueryProgress:
        """Return how the commits go."""


class ExactlyOnceQuery(StreamingQuery):
    """A streaming query whose end is the end of its commits; ``handle`` is the JVM's of the query."""

    def __init__(self, handle: Any, owner: AwaitableCommits) -> None:
        super().__init__(handle)
        self._owner = owner

    def awaitTermination(self, timeout: int | None = None) -> bool | None:  # noqa: N802 - Spark's name
        """Wait for the query to end, and for its decided epochs to be visible.

        ``timeout`` in seconds is for the query alone. Raises the error of this package that ended the query, such as
        `RowsRejected`, else Spark's StreamingQueryException.
        """
        refuse_to_wait()
        ended, failure = failure_of(partial(super().awaitTermination, timeout))
        if ended is not False:
            # a query that failed has decided epochs too
            self._owner.await_committed()
        if failure is not None:
            raise failure
        return ended

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        """Wait until all input that is available now has been processed and is visible in the sinks."""
        refuse_to_wait()
        _, failure = failure_of(super().processAllAvailable)
        if failure is not None:
            self._owner.await_committed()
            raise failure
        self._owner.await_settled()

    @property
    def sinkProgress(self) -> QueryProgress:  # noqa: N802 - in the manner of Spark's lastProgress
        """How the commits of this query go; see `ExactlyOnce.progress`."""
        return self._owner.progress()

    def stop(self) -> None:
        """Stop the query, and wait until its decided epochs are visible; in ``on_progress=``, do not wait."""
        if is_committing():
            # the stream thread may wait for this one to commit, and Spark's stop waits for the stream thread
            threading.Thread(target=super().stop, name="epochsink-stop", daemon=True).start()
            return
        super().stop()
        self._owner.await_commits()
