"""One run of a streaming query: from its recovery on, Spark's calls for its epochs, until its last commit."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Self

from epochsink.errors import Addresses, ConfigurationError, EpochsinkError
from epochsink.protocol import failed_start
from epochsink.protocol.checkpoint import Checkpoint, OpenCheckpoint
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.progress import EpochProgress, QueryProgress
from epochsink.protocol.storage import LocalStorage
from epochsink.protocol.store_failure import is_of_store, stopped_by
from epochsink.retry import retrying
from epochsink.sink import Participant, Sink, participants_of
from epochsink.spark.engine import Execution, Pipeline
from epochsink.spark.epoch_attempts import ATTEMPTS, EpochAttempts
from epochsink.spark.epoch_writer import EpochWriter
from epochsink.spark.retried_reads import RetriedReads
from epochsink.spark.running_query import RunningQuery, complete

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_log = logging.getLogger("epochsink")

LOCAL_POLL_SECONDS: Final = 0.002
REMOTE_POLL_SECONDS: Final = 0.05
"""How often the commit log is looked at first while an epoch is pending: a system call, or a request to a store."""

# weak: the object that has made a run keeps it for as long as it is of use
_serving: Final[weakref.WeakValueDictionary[str, Run]] = weakref.WeakValueDictionary()
"""Which run serves which execution of a query, by Spark's run id, in this process."""


def run_of(execution: Execution) -> Run | None:
    """Return the run that serves an execution of a query, whichever object has made it."""
    return _serving.get(execution.run_id)


def new_driver(start: str = "") -> str:
    """Return a name for the driver of a run that no other has; it begins with ``start``."""
    return start + uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the runs of a query have in common: the arguments of `ExactlyOnce`, and what completes errors.

    ``application`` is the name by which the operator finds the Spark application, ``reference`` MODULE:ATTRIBUTE of the
    sinks, each "" if it is not known.
    """

    sinks: Mapping[str, Sink]
    join_running: bool | str = False
    retain_seconds: float = 0.0
    show_values: bool = False
    application: str = ""
    reference: str = ""

    @classmethod
    def of(cls, pipeline: Pipeline, application: str, join_running: bool | str) -> Self:  # noqa: FBT001 - a word too
        """Return those of a pipeline's run, which may join a running checkpoint as ``join_running`` says."""
        return cls(
            pipeline.sinks,
            join_running,
            pipeline.retain_seconds,
            pipeline.show_values,
            application,
            pipeline.reference,
        )


class Run:
    """Recovers when made. Then `bind` ties it to Spark's execution, and Spark calls `foreach_batch` for each epoch.

    ``starts`` is False for a recovery at the end of a query, whose failure the next start meets again. Raises what
    `epochsink.protocol.coordinator.Coordinator.recover` raises.
    """

    def __init__(
        self,
        settings: RunSettings,
        opened: OpenCheckpoint,
        query_id: str,
        *,
        driver: str,
        starts: bool = True,
        on_progress: Callable[[EpochProgress], None] | None = None,
    ) -> None:
        self._query_id = query_id
        self._show_values = show_values = settings.show_values
        self._poll_seconds = LOCAL_POLL_SECONDS if isinstance(opened.files, LocalStorage) else REMOTE_POLL_SECONDS
        self._participants = participants_of(settings.sinks)
        if settings.retain_seconds:
            _refuse_retaining(self._participants)
        files = RetriedReads(opened.files)
        self._checkpoint = Checkpoint(files)
        self._coordinator = Coordinator(
            query_id=query_id,
            ledger=Ledger(files, driver, application=settings.application),
            checkpoint=self._checkpoint,
            spool=opened.spool,
            participants=self._participants,
            join_running=settings.join_running,
            retain_seconds=settings.retain_seconds,
            location=opened.location,
            reference=settings.reference,
            listener=on_progress,
        )
        contexts, identity = self._coordinator.contexts, self._coordinator.identity
        self._writer = EpochWriter(settings.sinks, contexts, identity, opened.spool, show_values=show_values)
        self._attempts = EpochAttempts(self._coordinator, self._writer)
        self._query: RunningQuery | None = None
        self._called = -1
        # one call after another: a user's function may have threads of its own
        self._call = threading.RLock()
        self._released = False
        try:
            self._coordinator.recover()
        except BaseException as failure:
            # this run ends here: sessions that stay open would look like those of a running driver
            self.release()
            if is_of_store(failure):
                failure = stopped_by(failure, "this start looked at what the last run has left")
            if isinstance(failure, EpochsinkError):
                complete(failure, self.addresses, show_values=show_values)
            # an operator who looks later reads it in the ledger; an interrupted start has not failed
            if starts and isinstance(failure, Exception):
                self.note_failure(failure)
            if isinstance(failure, EpochsinkError):
                # its causes may quote rows
                raise failure.fresh() from None
            raise
        if starts:
            with suppress(OSError):
                failed_start.forget(files)

    @property
    def execution(self) -> Execution | None:
        """The execution to which this run is bound; None before that."""
        return None if self._query is None else self._query.execution

    def serves(self, execution: Execution) -> bool:
        """Return whether this run is bound to an execution."""
        return self.execution is not None and self.execution.run_id == execution.run_id

    def awaits(self, execution: Execution) -> bool:
        """Return whether this run was recovered for the query of an execution, and is not bound yet."""
        return self._query is None and self._query_id == execution.query_id

    def bind(self, execution: Execution) -> None:
        """Start to commit the epochs of an execution; once."""
        _serving[execution.run_id] = self
        self._query = RunningQuery(
            execution,
            self._coordinator,
            self._poll_seconds,
            release=self.release,
            show_values=self._show_values,
        )

    def has_ended(self) -> bool:
        """Return whether no query runs; if it has ended, first wait for the last commits."""
        return self._query is None or self._query.has_ended()

    def join(self) -> None:
        """Wait for the last commits. Raises what stopped them."""
        failure = self._query.join() if self._query is not None else None
        if failure is not None:
            raise failure

    def progress(self) -> QueryProgress:
        """Return how the commits go."""
        return self._coordinator.progress.snapshot()

    @property
    def addresses(self) -> Addresses:
        """What completes the commands of errors."""
        return self._coordinator.addresses

    def note_failure(self, failure: BaseException) -> None:
        """Keep why the query stops, in words without values of rows."""
        self._coordinator.note_failure(failure)

    def settled(self) -> None:
        """Wait until no epoch is pending."""
        self._coordinator.queue.wait_settled()

    def release(self) -> None:
        """Close the participants, once. May be repeated."""
        if self._released:
            return
        self._released = True
        self._writer.close()
        for participant in self._participants:
            participant.close()

    def source_of(self, number: int) -> str:
        """Return from where to where an epoch reads its sources; for people."""
        return self._checkpoint.source_of(number)

    def foreach_batch(self, frame: DataFrame, number: int) -> None:
        """Prepare one epoch; after `bind`.

        Raises `ConfigurationError` if an earlier call has already prepared it.
        """
        if self._query is None:
            raise RuntimeError("foreach_batch() before bind()")
        with self._call:
            if number == self._called:
                self.refuse_call(number, _called_twice(number))
            # meanwhile the commit thread does not end the query: the batch itself raises what stopped the commits
            self._query.in_batch = True
            try:
                self._attempts.prepare(frame, number, self._query)
                # only now: after a failure the function may call again in the same batch
                self._called = number
            finally:
                self._query.in_batch = False

    def refuse_call(self, number: int, mistake: ConfigurationError) -> NoReturn:
        """Refuse another call in an epoch. If the caller catches the error, nothing that follows is prepared."""
        with self._call:
            _log.error("epoch %d: %s", number, mistake)
            if unrecorded := self._dispute(number):
                mistake = ConfigurationError(
                    f"{mistake.message}. That the record of epoch {number} lacks rows could not be noted: {unrecorded}",
                    hint="start the query once more with the code as it is, until this error comes without that; then "
                    f"correct it: {mistake.hint}",
                )
            self._coordinator.fail(mistake)
        raise mistake

    def _dispute(self, number: int) -> str:
        """Note that the record of an epoch lacks rows; return why that could not be done, "" if it was."""
        try:
            retrying(_is_of_store, attempts=ATTEMPTS)(self._coordinator.dispute, number)
        except (EpochsinkError, OSError) as failure:
            return str(failure)
        return ""


def _is_of_store(failure: BaseException) -> bool:
    return isinstance(failure, OSError)


def _called_twice(number: int) -> ConfigurationError:
    return ConfigurationError(
        f"ExactlyOnce was called twice in epoch {number}, and an epoch is recorded once: the rows of the second call "
        "would be in no sink",
        hint="call it once in each epoch; for several targets, give one object several sinks, each with its where=: "
        "sinks={'paid': Postgres(..., where=\"state = 'paid'\"), 'all': Kafka(...)}. "
        f"The next start runs epoch {number} again, and writes it whole. If the function caught this error, the epoch "
        "may keep the rows of the first call only",
    )


def _refuse_retaining(participants: Sequence[Participant]) -> None:
    """Refuse ``retain=`` if no rows, or only those of some epochs, would be there for a repair."""
    repaired = {name: sink for one in participants if one.operator().losses() for name, sink in one.members.items()}
    if not repaired:
        raise ConfigurationError(
            "retain= keeps rows for 'epochsink repair', and none of these sinks is of a kind that is repaired",
            hint="leave retain= out; Kafka, PostgreSQL and Elasticsearch are repaired",
        )
    for name, sink in repaired.items():
        if sink.spool is False:
            raise ConfigurationError(
                f"retain= keeps rows in the spool, and sink '{name}' has spool=False",
                hint="leave spool=False out, or retain=",
            )
