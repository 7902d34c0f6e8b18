"""`ExactlyOnce`, the callable for ``foreachBatch``."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from pyspark import cloudpickle
from pyspark.sql import is_remote

from epochsink import __version__, arguments
from epochsink.errors import Addresses, ConfigurationError, EpochsinkError, UnsupportedQuery
from epochsink.protocol import failed_start
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.protocol.commit_thread import refuse_to_wait
from epochsink.protocol.joining import REWRITE
from epochsink.protocol.ledger import begun_query
from epochsink.protocol.progress import EpochProgress, QueryProgress
from epochsink.protocol.spool import NO_SPOOL
from epochsink.protocol.storage import refuse_unconditional_create
from epochsink.sink import Sink, comparing
from epochsink.spark import argument_checks
from epochsink.spark.engine import Execution
from epochsink.spark.engines import engine_of
from epochsink.spark.error_translation import FailedEpoch
from epochsink.spark.import_guard import refuse_query
from epochsink.spark.module_reference import reference_to
from epochsink.spark.query_handle import ExactlyOnceQuery
from epochsink.spark.query_plan import refuse_bad_plan, row_schemas
from epochsink.spark.query_run import Run, RunSettings, new_driver, run_of
from epochsink.spark.write_task import other_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    # these need grpcio, which a driver with a JVM may lack
    from epochsink.spark.connect.query_handle import ConnectQuery
    from epochsink.spark.connect.server import ConnectServer


_OF_THE_PROCESS: Final = ("_failed", "_lock", "_run", "_query", "_checked", "_writers")


@arguments.checked_names
class ExactlyOnce:
    """Writes each epoch of a streaming query to its sinks so that it becomes visible once, after the checkpoint.

    Use `start`, or pass the object to ``foreachBatch`` by hand. One object serves one query at a time, with one call an
    epoch; it may be started again when that query has ended.

    Args:
        checkpoint: the query's checkpointLocation, the path or URI of a folder.
        sinks: the destinations by name, e.g. {"table": Postgres(...)}; the name is part of a sink's identity in its
            target, so keep it.
        spool: where durable copies of rows are kept until their epoch is done, a place that driver and executors
            share; None for a folder in the checkpoint.
        storage_options: settings of an object store that holds checkpoint or spool, by obstore's names, e.g.
            {"endpoint": "http://minio:9000"}; what is not given is taken from the session's Hadoop settings.
        join_running: allow the first start on a checkpoint that already holds decided epochs. If an epoch was begun
            and not decided, this is refused, because the old code may have written a part of it; "rewrite" allows it.
        retain: for how long the rows of done epochs stay in the spool, e.g. "24h", so that `epochsink repair` can apply
            them again to a target that was set back; None to drop them at once.
        show_values: let errors and logs quote values of rows that a target refuses.
        on_progress: is called with the `EpochProgress` of each epoch that has become visible, in the thread that
            commits: return soon. An exception that it raises is logged, and the query continues. It may call the
            query's ``stop``, which does not wait there; functions that wait for commits raise `ConfigurationError`.

    Raises `ConfigurationError`.
    """

    def __init__(
        self,
        *,
        checkpoint: str,
        sinks: Mapping[str, Sink],
        spool: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        join_running: bool | Literal["rewrite"] = False,
        retain: str | None = None,
        show_values: bool = False,
        on_progress: Callable[[EpochProgress], None] | None = None,
    ) -> None:
        self.checkpoint = argument_checks.checked_checkpoint(checkpoint)
        self.sinks = argument_checks.checked_sinks(sinks)
        self.spool = argument_checks.checked_spool(spool)
        self.storage_options = dict(storage_options or {})
        self.join_running = argument_checks.checked_join(join_running)
        self.retain_seconds = arguments.duration("retain", retain)
        self.show_values = arguments.flag("show_values", show_values)
        if on_progress is not None and not callable(on_progress):
            raise ConfigurationError(
                f"invalid on_progress={on_progress!r}: it must be a function of one argument, the progress of an epoch",
                hint="for example on_progress=print",
            )
        self.on_progress = on_progress
        self._pickled_reference = ""
        self._begin()

    @property
    def reference(self) -> str:
        """MODULE:ATTRIBUTE by which the command line finds the sinks; "" if no module has this object."""
        # a copy that was pickled is in no module
        return self._pickled_reference or reference_to(self, self.sinks)

    def _begin(self) -> None:
        """Make what belongs to this object in this process, and does not go with a pickle."""
        self._failed = FailedEpoch(self._addresses, self._notes_on, self._note_failure, show_values=self.show_values)
        # start() and the first batch, in the stream thread, both may make the run
        self._lock = threading.RLock()
        self._run: Run | None = None
        # in a client of Spark Connect, where the run is in the server
        self._query: ConnectQuery | None = None
        self._checked = False
        # these have our foreachBatch, and may be started again
        self._writers: weakref.WeakSet[DataStreamWriter] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only, as Spark Connect does to call a copy in its server."""
        given = {name: value for name, value in vars(self).items() if name not in _OF_THE_PROCESS}
        given["_pickled_reference"] = self.reference
        # bytes until the versions are compared: see `with_same_version`
        return _restored, (__version__, cloudpickle.dumps((type(self), given)))  # type: ignore[no-untyped-call]

    def __setstate__(self, given: dict[str, Any]) -> None:
        """Take the arguments that were pickled."""
        vars(self).update(given)
        self._begin()

    def start(self, writer: DataStreamWriter) -> ExactlyOnceQuery:
        """Check the sinks, recover what the last run left, and start the query.

        ``writer`` is ``frame.writeStream`` with trigger, query name and output mode as you like them. The query's
        ``awaitTermination`` and ``stop`` also wait until its decided epochs are visible. Raises `ConfigurationError`,
        `CheckFailed`, `WentBack`, `OutcomeUnknown` before any row moves.
        """
        refuse_query()
        argument_checks.refuse_bad_writer(writer, self.checkpoint, self.sinks, again=writer in self._writers)
        engine = engine_of(writer)
        frame = engine.frame_of(writer)
        server = _server_of(frame.sparkSession)
        if server is not None:
            self._refuse_active(frame.sparkSession)
            self._writers.add(writer)
            self._query = server.start(self, writer, frame)
            return cast("ExactlyOnceQuery", self._query)
        with self._noting_failure(frame.sparkSession):
            opened = self._check(frame)
            # before the query starts: its first batch may be an hour away, and readers wait for what is decided
            self._recover(frame.sparkSession, opened)
        self._writers.add(writer)
        query = engine.start(writer, self, self.checkpoint)
        try:
            self._adopt(frame.sparkSession, engine.execution_of_query(query), opened)
        except BaseException:
            # the caller gets no handle by which to stop it
            query.stop()
            raise
        return ExactlyOnceQuery(engine.handle_of(query), self)

    def check(self, frame: DataFrame) -> list[str]:
        """Compare the configuration and the stream's columns with the live targets; nothing is changed there.

        Return what a start would make or change in the targets, a phrase each, such as "create topic 'orders'".
        Raises `CheckFailed`, which lists every finding of every sink, each with its hint.
        """
        server = _server_of(frame.sparkSession)
        if server is not None:
            return server.compare(self, frame)
        checked = self._checked
        with comparing() as would:
            self._check(frame)
        # a query that is started by hand makes in its first batch what is missing
        self._checked = checked
        return would

    def _check(self, frame: DataFrame) -> OpenCheckpoint:
        engine = engine_of(frame.sparkSession)
        schemas = row_schemas(frame, self.sinks)
        engine.refuse_bare_executors(frame.sparkSession)
        # first: a server is not asked to create what no row fits
        refuse_bad_plan(frame, self.sinks, schemas)
        argument_checks.refuse_unfit(self.sinks, schemas)
        opened = self._open(frame.sparkSession)
        refuse_unconditional_create(opened.files, opened.location)
        self._checked = True
        return opened

    def recover(self, session: SparkSession) -> None:
        """Commit what the last run of the query decided and did not get to commit, and abort its leftovers.

        Part of `start`. If you set ``foreachBatch(sink)`` by hand, the first batch does it; call this before the query
        starts if no input may come for a while. On a fresh checkpoint there is nothing to recover. Raises
        `ConfigurationError` while a query of this object runs.
        """
        server = _server_of(session)
        if server is not None:
            # it takes the checkpoint, and would end the query
            self._refuse_active(session)
            server.recover(self)
            return
        self._recover(session, self._open(session))

    def _recover(self, session: SparkSession, opened: OpenCheckpoint) -> None:
        with self._lock:
            self._refuse_active()
            query_id = begun_query(opened.files)
            if query_id is not None:
                self._run = self._make_run(session, opened, query_id, join_running=self.join_running)

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Prepare one epoch: what Spark calls for each micro-batch."""
        refuse_query()
        session = frame.sparkSession
        engine = engine_of(session)
        known = self._run.execution if self._run is not None else None
        execution = engine.execution_of_batch(session, known, lambda: self._open(session))
        own = execution.batch(epoch)
        with self._failed.told_to_spark(epoch if own is None else own, execution):
            self._refuse_second_object(execution, epoch)
            _refuse_other_number(execution, epoch, own)
            with self._noting_failure(session, execution.is_active):
                opened = None if self._checked else self._check(frame)
                run = self._adopt(session, execution, opened)
            run.foreach_batch(frame, epoch)

    def await_committed(self) -> None:
        """Wait until the query's commit thread has ended. Raises what stopped it, or what made the newest epoch fail.

        For queries started by hand: call this after ``query.awaitTermination()``.
        """
        self.await_commits()
        if isinstance(self._failed.failure, EpochsinkError):
            raise self._failed.failure.fresh()

    def await_commits(self) -> None:
        """Wait until the query's commit thread has ended. Raises what stopped it, not what made an epoch fail."""
        refuse_to_wait()
        if self._run is not None:
            self._run.join()
        elif is_remote():
            raise UnsupportedQuery(
                "the commits of a query on Spark Connect run in its server, and this process cannot wait for them",
                hint="use sink.start(writer), whose query waits for them; or call sink.recover(spark) after the end of "
                "the query",
            )

    def await_settled(self) -> None:
        """Wait until every recorded epoch is committed. Raises what made a commit fail."""
        refuse_to_wait()
        run = self._run
        if run is not None:
            run.settled()

    def progress(self) -> QueryProgress:
        """Return how the commits of the query go: what is pending and how late, and the newest epochs.

        Of the present run, or of the last one if none runs; empty before the first. May be called from any thread.
        """
        return QueryProgress() if self._run is None else self._run.progress()

    def _adopt(self, session: SparkSession, execution: Execution, opened: OpenCheckpoint | None) -> Run:
        """Return the run of this execution of the query: made by `recover`, or made now of what is opened."""
        with self._lock:
            run = self._run
            if run is not None and run.serves(execution):
                return run
            engine = engine_of(session)
            # here too: of a query that was started by hand, `start` has seen no writer
            given, used = (engine.location_of(session, each) for each in (self.checkpoint, execution.checkpoint()))
            execution.refuse_unlike(given, used)
            argument_checks.refuse_complete(execution.output_mode(), self.sinks)
            if run is None or not run.awaits(execution):
                self._refuse_active()
                opened = opened or self._open(session)
                # in its first batch, which Spark has begun: whether the old code had begun it is not known
                join: bool | str = REWRITE if self.join_running else False
                run = self._run = self._make_run(session, opened, execution.query_id, join_running=join)
            run.bind(execution)
            return run

    def _refuse_second_object(self, execution: Execution, epoch: int) -> None:
        # before the second object takes the ledger, which would fence the first object
        other = run_of(execution)
        if other is not None and other is not self._run:
            other.refuse_call(
                epoch,
                ConfigurationError(
                    f"two ExactlyOnce objects are called for one query, in epoch {epoch}: only one of them can record "
                    "it, and the rows of the other would be in no sink",
                    hint="make one object, once, outside of the function, with all the sinks: "
                    "ExactlyOnce(checkpoint=..., sinks={'table': Postgres(...), 'topic': Kafka(...)}); where= says "
                    f"which rows go where. The next start runs epoch {epoch} again, and writes it whole. If the "
                    "function caught this error, the epoch may keep the rows of the first object only",
                ),
            )

    def _refuse_active(self, session: SparkSession | None = None) -> None:
        runs_there = session is not None and self._query is not None and self._query.is_active_in(session)
        if runs_there or (self._run is not None and not self._run.has_ended()):
            raise ConfigurationError(
                f"this ExactlyOnce already serves a running query on checkpoint {self.checkpoint}",
                hint="stop that query first, or make an ExactlyOnce with a checkpoint of its own for the other",
            )

    def _make_run(
        self, session: SparkSession, opened: OpenCheckpoint, query_id: str, *, join_running: bool | str
    ) -> Run:
        # it may be the failure of an earlier query that this object served
        self._failed.failure = None
        engine = engine_of(session)
        settings = RunSettings.of(self, engine.application(session), join_running)
        driver = new_driver(engine.start_id())
        return Run(settings, opened, query_id, driver=driver, on_progress=self.on_progress)

    def _notes_on(self, epoch: int) -> list[str]:
        """Return what is known of an epoch that failed, in lines for the user."""
        notes = [f"Epoch: {epoch}; nothing of it is visible, and the next start writes it again"]
        if self._run is not None:
            notes.append(f"Source: {self._run.source_of(epoch)}")
        return notes

    def _addresses(self) -> Addresses:
        """Return what completes the commands of errors, also before there is a run."""
        if self._run is not None:
            return self._run.addresses
        return Addresses(self.checkpoint, self.reference, self.spool or "")

    def _note_failure(self, failure: BaseException) -> None:
        if self._run is not None:
            self._run.note_failure(failure)

    @contextmanager
    def _noting_failure(self, session: SparkSession, goes_on: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Keep why a start fails, for `epochsink status`: the ledger has it only if the start has taken it.

        If the query does not go on, its own stop() may be the reason.
        """
        try:
            yield
        except (EpochsinkError, OSError) as failure:
            # best effort: the store may be the reason
            with suppress(Exception):
                if goes_on():
                    engine = engine_of(session)
                    opened = engine.open_checkpoint(session, self.checkpoint, self.storage_options, self.spool)
                    failed_start.note(opened.files, failure, engine.application(session))
            raise

    def _open(self, session: SparkSession) -> OpenCheckpoint:
        opened = engine_of(session).open_checkpoint(session, self.checkpoint, self.storage_options, self.spool)
        try:
            opened.spool.check()
        except ConfigurationError:
            # without a sink that keeps rows there, a spool out of reach stops nothing
            if any(sink.spool is not False for sink in self.sinks.values()):
                raise
            return replace(opened, spool=NO_SPOOL)
        return opened


def _server_of(session: SparkSession) -> ConnectServer | None:
    """Return where the runs of a session's queries live; None if they live in this process."""
    if engine_of(session).runs_here():
        return None
    from epochsink.spark.connect.server import ConnectServer  # noqa: PLC0415 - needs grpcio, which only clients have

    return ConnectServer(session)


def _restored(version: str, sealed: bytes) -> ExactlyOnce:
    """Return the object of a pickle that another process has made."""
    if version != __version__:
        raise other_version("Spark's server", __version__, version)
    kind, given = pickle.loads(sealed)  # noqa: S301 - the user's own
    pipeline: ExactlyOnce = kind.__new__(kind)
    pipeline.__setstate__(given)
    return pipeline


def _refuse_other_number(execution: Execution, epoch: int, own: int | None) -> None:
    """Refuse a number that is not ``own``, that of Spark's batch: a later start would take it for another epoch."""
    if epoch == own:
        return
    mistake = execution.wrong_number(epoch, own)
    run = run_of(execution)
    if run is not None and own is not None:
        run.refuse_call(own, mistake)
    raise mistake
