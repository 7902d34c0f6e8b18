"""What the client of Spark Connect has the server do: check, recover, start a query, and finish its commits.

Checkpoint and targets are asked in tasks: the client need not reach them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException

from epochsink.errors import Addresses, ConfigurationError, EpochsinkError, UnsupportedQuery
from epochsink.protocol import failed_start
from epochsink.protocol.store_failure import remedy
from epochsink.sink import Sink, comparing
from epochsink.spark.argument_checks import refuse_unfit
from epochsink.spark.connect import compat
from epochsink.spark.connect.checkpoint_files import place_of
from epochsink.spark.connect.execution import Started
from epochsink.spark.connect.query_handle import ConnectQuery
from epochsink.spark.connect.recovery import RecoveryContext, Standing
from epochsink.spark.connect.tasks import in_task
from epochsink.spark.engine import Pipeline
from epochsink.spark.query_plan import refuse_bad_plan, row_schemas
from epochsink.spark.query_run import RunSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


WAIT_SECONDS: Final = 10.0
"""How long one task waits for epochs to become visible while the query runs."""
_TOO_BUSY: Final = "Python worker failed to connect back"
LAST_COMMIT_SECONDS: Final = 1.0
"""How long the process of an ended run may take for its last commit: Spark kills it within a second or two."""


class ConnectServer:
    """The server of a session, for the runs of its queries."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def check(self, pipeline: Pipeline, frame: DataFrame) -> None:
        """Check the plan by the server's analysis, and the sinks in a task."""
        schemas = row_schemas(frame, pipeline.sinks)
        refuse_bad_plan(frame, pipeline.sinks, schemas)
        in_task(self._session, partial(_fit, pipeline.sinks, schemas))

    def compare(self, pipeline: Pipeline, frame: DataFrame) -> list[str]:
        """Check likewise, and change nothing; return what a start would make in the targets."""
        with comparing() as would:
            schemas = row_schemas(frame, pipeline.sinks)
            refuse_bad_plan(frame, pipeline.sinks, schemas)
            there: list[str] = json.loads(in_task(self._session, partial(_compared, pipeline.sinks, schemas)))
        return list(dict.fromkeys([*there, *would]))

    def recover(self, pipeline: Pipeline) -> None:
        """Commit what the last run decided, and abort its leftovers, in a task."""
        self._recover(self._recovery(pipeline))

    def start(self, pipeline: Pipeline, writer: DataStreamWriter, frame: DataFrame) -> ConnectQuery:
        """Check, recover, and start the query."""
        if compat.option_of(writer, "asyncProgressTrackingEnabled").lower() == "true":
            raise UnsupportedQuery(
                "with async progress tracking an epoch may have other offsets when it runs again",
                hint="remove the option asyncProgressTrackingEnabled",
            )
        try:
            self.check(pipeline, frame)
            recovery = self._recovery(pipeline)
            before = self._recover(recovery)
        except EpochsinkError as failure:
            # best effort: the store may be the reason
            with suppress(Exception):
                in_task(self._session, partial(_noted, self._recovery(pipeline), failure))
            raise
        session: Any = self._session
        try:
            batch = Started(pipeline, session.session_id, recovery.start)
            query = writer.foreachBatch(batch).option("checkpointLocation", pipeline.checkpoint).start()
        except AnalysisException:
            # Spark does not take such a query, wherever its checkpoint is
            raise
        except PySparkException as refused:
            raise _not_started(refused, pipeline.checkpoint) from refused
        started: Any = query
        addresses = Addresses(pipeline.checkpoint, spool=pipeline.spool or "")
        return ConnectQuery(session, started, ServerCommits(session, recovery, query.id, before), addresses)

    def _recover(self, recovery: RecoveryContext) -> Standing:
        return Standing.from_json(in_task(self._session, recovery.recover))

    def _recovery(self, pipeline: Pipeline) -> RecoveryContext:
        place = place_of(self._session, pipeline.checkpoint, pipeline.storage_options, pipeline.spool)
        application = self._session.conf.get("spark.app.id", None) or ""
        settings = RunSettings.of(pipeline, application, pipeline.join_running)
        return RecoveryContext(settings, place, uuid.uuid4().hex)


class ServerCommits:
    """The commits of one query, as a client waits for them."""

    def __init__(self, session: SparkSession, recovery: RecoveryContext, query_id: str, before: Standing) -> None:
        self._session = session
        self._recovery = recovery
        self._query_id = query_id
        self._before = before

    def settle(self, *, ended: bool) -> tuple[tuple[int, ...], str]:
        """Wait for the epochs of the query; return those that are still not visible, and why the run failed, or "".

        If the query has ``ended``, what its run has left is committed.
        """
        seconds = LAST_COMMIT_SECONDS if ended else WAIT_SECONDS
        settle = partial(self._recovery.settle, self._query_id, self._before, seconds, ended=ended)
        standing = Standing.from_json(in_task(self._session, settle))
        return standing.pending, standing.stopped if standing.stopped != self._before.stopped else ""


def _noted(recovery: RecoveryContext, failure: EpochsinkError) -> str:
    failed_start.note(recovery.place.open().files, failure, recovery.settings.application)
    return ""


def _fit(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> str:
    refuse_unfit(sinks, schemas)
    return ""


def _compared(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> str:
    with comparing() as would:
        refuse_unfit(sinks, schemas)
    return json.dumps(would)


def _not_started(refused: PySparkException, checkpoint: str) -> ConfigurationError:
    text = str(refused).strip()
    missing = re.search(r"ModuleNotFoundError: .*", text)
    if missing is not None:
        return ConfigurationError(
            f"the Python in which Spark's server calls foreachBatch lacks a module: {missing[0]}",
            hint="install epochsink with the extras of your sinks, and the modules of your own, in the Python of the "
            "server (PYSPARK_PYTHON): spark.addArtifacts() brings modules to tasks, and not there",
        )
    return ConfigurationError(
        f"Spark does not start a query on checkpoint={checkpoint!r}: {text.splitlines()[0]}",
        hint="the server is too busy to begin a Python process within 10 s: start the query again"
        if _TOO_BUSY in text
        else remedy(refused, "give a folder that Spark can make and write"),
    )
