"""The execution of a query, as seen by the process in which the server of Spark Connect calls foreachBatch.

That process serves one run of one query, and ends with it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import ConfigurationError, EpochsinkError
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.spark.engine import Execution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger("epochsink")

_RUN: Final = uuid.uuid4().hex
"""Stands for Spark's id of the run, which this process does not learn."""
_SERVER: Final = "SPARK_CONNECT_LOCAL_URL"
"""In the environment of this process: the server's URL, with the user."""
_WORKER: Final = "foreach_batch_worker.py"
_CAUGHT: Final = 70


# the id of the client's session, if `start` has started the query
_client_session: list[str] = []
# the id of that start, likewise
_start: list[str] = []


class Started:
    """A foreachBatch that tells its process the id of the client's session, which lists the query, and of its start.

    From 4.3 on, foreachBatch has a session of its own, which lists none.
    """

    def __init__(self, batch: Callable[[DataFrame, int], None], session_id: str, start: str) -> None:
        self._batch = batch
        self._session_id = session_id
        self._start = start

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Call the function."""
        _client_session[:] = [self._session_id]
        _start[:] = [self._start]
        self._batch(frame, epoch)


def start_id() -> str:
    """Return the id of the start that this process serves; "" for a query that was started by hand."""
    return "".join(_start)


def has_own_session(session: SparkSession) -> bool:
    """Return whether the session is known to be that of this run alone, whose settings no other query has."""
    own: Any = session
    return bool(_client_session) and _client_session[0] != own.session_id


class EpochFailed(Exception):
    """Carries an error of this package to the client of Spark Connect, as text and as a line that it can read."""


class ConnectExecution(Execution):
    """The execution whose foreachBatch this process runs. It ends when the process ends."""

    run_id = _RUN

    def __init__(self, session: SparkSession, query_id: str, checkpoint: Checkpoint, location: str) -> None:
        self.query_id = query_id
        self._session = session
        self._checkpoint = checkpoint
        self._location = location
        self._is_listed = self._found() is not None

    def _found(self) -> Any:
        return self._session.streams.get(self.query_id)

    def _found_by_client(self) -> Any:
        """Return the query as the client's session knows it, which is not asked before the run fails."""
        if not _client_session:
            return None
        kind: Any = type(self._session)
        session = kind.builder.remote(f"{os.environ[_SERVER]};session_id={_client_session[0]}").create()
        return session.streams.get(self.query_id)

    def is_alive(self) -> bool:
        """Return whether the thread lives in which the server calls foreachBatch."""
        return threading.main_thread().is_alive()

    def is_active(self) -> bool:
        """Return False if the query is known to have been stopped."""
        return not self._is_listed or self._found() is not None

    def fail(self, failure: BaseException) -> None:
        """Stop the query if its session is known; else the next batch raises the error."""
        del failure
        self.stop()

    def raised(self, error: Exception) -> Exception:
        """Return what foreachBatch raises, so that the client learns the kind of the error too."""
        return EpochFailed(f"{error}\n{error.to_line()}") if isinstance(error, EpochsinkError) else error

    def end_from_within(self, failure: BaseException) -> None:
        """End this process unless the error reaches Spark, which otherwise would decide the epoch."""
        del failure
        end_if_caught()

    def stop(self) -> None:
        """Stop the query if its session is known."""
        query = self._found() or self._found_by_client()
        if query is not None:
            query.stop()

    def output_mode(self) -> str:
        """Return the mode that does no harm: only the client, in `start`, can know the real one."""
        return "Append"

    def checkpoint(self) -> str:
        """Return the checkpoint that `ExactlyOnce` was given: Spark does not tell its own (see `batch`)."""
        return self._location

    def has_state(self) -> bool:
        """Return True: whether the plan has state is not known here."""
        return True

    def unrepeatable_state(self) -> list[str]:
        """Return nothing: the plan is not known here."""
        return []

    def refuse_unlike(self, location: str, used: str) -> None:
        """Refuse, for a query by hand, the checkpoint of one that does not run, if the session lists those that do.

        From 4.3 on it lists none. Then only `batch` compares each call with the checkpoint.
        """
        del used
        if not (_client_session or self._is_listed) and self._session.streams.active:
            raise ConfigurationError(
                f"ExactlyOnce was given the checkpoint of query {self.query_id}, which does not run ({location}): the "
                "commits there would not be the decisions on this query's epochs",
                hint="set .option('checkpointLocation', sink.checkpoint) on the writer, or use sink.start(writer), "
                "which does",
            )

    def batch(self, epoch: int) -> int | None:
        """Return the number of the batch that the checkpoint says is under way; ``epoch`` is what is expected."""
        checkpoint = self._checkpoint
        if checkpoint.is_under_way(epoch) and (epoch == 0 or checkpoint.is_decided(epoch - 1)):
            return epoch
        newest = checkpoint.newest_begun()
        return newest if newest != epoch and checkpoint.is_under_way(newest) else None

    def wrong_number(self, epoch: int, own: int | None) -> ConfigurationError:
        """Return the error for a call with a number that is not the batch's own."""
        known = "no batch is under way" if own is None else f"batch {own} is under way"
        return ConfigurationError(
            f"ExactlyOnce was called with the number {epoch!r}, and the checkpoint that it was given says that {known} "
            f"({self._location}): the commits there would not be the decisions on this query's epochs",
            hint="set .option('checkpointLocation', sink.checkpoint) on the writer, or use sink.start(writer), which "
            "does; pass on the number that foreachBatch gives your function; and remove the options of async progress "
            "tracking, with which the checkpoint lags behind",
        )


@contextmanager
def never_caught() -> Iterator[None]:
    """End this process if the body raises an error that does not reach Spark."""
    try:
        yield
    except EpochsinkError:
        end_if_caught()
        raise


def end_if_caught() -> None:
    """From now on, end this process when foreachBatch returns, instead of raising to Spark.

    Spark writes the commit of an epoch as soon as foreachBatch has returned, and there is no other way from here to
    prevent that. A debugger's hook looks at the frame of Spark's loop: an exception that passes it has not been caught.
    """
    loop = _frame_of_spark(sys._getframe())  # noqa: SLF001 - the documented way to a frame
    if loop is None:
        return

    def look(_: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            _log.critical("foreachBatch has caught an error of epochsink, and the epoch must not be decided: ending it")
            logging.shutdown()
            os._exit(_CAUGHT)
        if event == "exception":
            loop.f_trace = None
            sys.settrace(None)
            return None
        return look

    loop.f_trace = look
    sys.settrace(lambda *_: None)


def _frame_of_spark(frame: FrameType | None) -> FrameType | None:
    while frame is not None and os.path.basename(frame.f_code.co_filename) != _WORKER:  # noqa: PTH119 - a text
        frame = frame.f_back
    return frame
