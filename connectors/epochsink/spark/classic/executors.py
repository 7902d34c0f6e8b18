"""Spark's executors: which ones can run the tasks of a query, and how a sink's commit uses them.

One task checks each application before any row moves. Executors that join later have not been checked: so each task
compares the version of epochsink before it unpickles what the driver sent.
"""

from __future__ import annotations

import pickle
import shlex
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException

from epochsink import __version__
from epochsink.errors import ConfigurationError
from epochsink.sink import NotCarriedOut
from epochsink.spark.error_translation import reason_of
from epochsink.spark.write_task import Given, Returned, other_version, with_same_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

POOL: Final = "epochsink"
"""The scheduler's pool: with ``spark.scheduler.mode=FAIR`` it has its own share of the cores, beside the stream's."""
LOOK_SECONDS: Final = 1.0
_SLICES_PER_CORE: Final = 4

# applications and their Pythons: the check is a Spark job, too slow for each start
_checked: set[tuple[str, str]] = set()


def refuse_bare_executors(session: SparkSession) -> None:
    """Raise `ConfigurationError` if the Python of an executor lacks what a task needs."""
    context = session.sparkContext
    asked = str(context.applicationId), str(context.pythonExec)
    if asked in _checked:
        return
    try:
        [(python, missing, found)] = context.parallelize([0], 1).map(_probe()).collect()
    except (Py4JError, PySparkException) as failure:
        raise ConfigurationError(
            f"the executors cannot run Python ({context.pythonExec}): {reason_of(str(failure))[:1000]}",
            hint="set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that every executor has",
        ) from failure
    if missing:
        raise ConfigurationError(
            f"the executors' Python {python} has no {' and no '.join(missing)}, so that no task could write a row",
            hint="on a cluster, install epochsink with the extras of your sinks in that Python on every host; if the "
            "executors run on this machine, type this and start again:\n"
            f"export PYSPARK_PYTHON={shlex.quote(sys.executable)}",
        )
    if found != __version__:
        raise other_version(f"the executors' Python {python}", found)
    _checked.add(asked)


def _probe() -> Callable[[int], tuple[str, list[str], str]]:
    def look(_: int) -> tuple[str, list[str], str]:
        # pickled as code, as above
        import importlib  # noqa: PLC0415
        import sys  # noqa: PLC0415

        missing = []
        for name in ("epochsink", "pyarrow", "numpy"):
            try:
                importlib.import_module(name)
            except ImportError:
                missing.append(name)
        return sys.executable, missing, getattr(sys.modules.get("epochsink"), "__version__", "")

    return look


class SparkExecutors:
    """The executors of one application (see `epochsink.sink.Executors`)."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context

    def map(self, function: Callable[[Given], Returned], parts: Sequence[Given], patience: float) -> list[Returned]:
        """Run one job; cancel it if none of its tasks runs for ``patience`` seconds. Raises `NotCarriedOut`."""
        try:
            job = _Job(self._context, function, parts)
            job.start()
        except (Py4JError, PySparkException, AssertionError, AttributeError, OSError) as failure:
            # what PySpark raises if the session has ended
            raise NotCarriedOut(f"no Spark job can be started: {failure}") from failure
        busy = time.monotonic()
        while job.is_alive():
            job.join(LOOK_SECONDS)
            if job.is_busy():
                busy = time.monotonic()
            elif time.monotonic() - busy > patience:
                job.cancel()
        if job.failure is not None:
            raise NotCarriedOut(f"the Spark job failed: {reason_of(str(job.failure))[:1000]}") from job.failure
        if len(job.answers) != len(parts):
            raise NotCarriedOut("the Spark session ended before the job had begun")
        return job.answers


class _Job(InheritableThread):
    """Runs one job in its own thread: a job has its thread's group and pool, and the caller's may be a stream's."""

    def __init__(self, context: SparkContext, function: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        super().__init__(target=self._work, name="epochsink-executors", daemon=True)
        self._context = context

        def unpacked(part: bytes) -> Any:
            return function(pickle.loads(part))  # noqa: S301 - the driver's own

        self._function = with_same_version(unpacked)
        # as bytes: PySpark unpickles the parts of a task before the versions are compared
        self._parts = [pickle.dumps(part) for part in parts]
        self._group = f"epochsink-{uuid.uuid4().hex}"
        self.answers: list[Any] = []
        self.failure: Exception | None = None

    def _work(self) -> None:
        try:
            self._context.setJobGroup(self._group, "epochsink: applying an epoch")
            self._context.setLocalProperty("spark.scheduler.pool", POOL)
            slices = min(len(self._parts), _SLICES_PER_CORE * self._context.defaultParallelism)
            self.answers = self._context.parallelize(self._parts, slices).map(self._function).collect()
        except Exception as failure:  # noqa: BLE001 - the caller raises it
            self.failure = failure

    def is_busy(self) -> bool:
        """Return whether a task of the job runs now."""
        try:
            tracker = self._context.statusTracker()
            jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group)))
            stages = [tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds]
            return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)
        except (Py4JError, PySparkException, OSError):
            # the JVM has ended or is about to: the job's own thread fails
            return False

    def cancel(self) -> None:
        """Cancel the job, so that its thread fails."""
        self._context.cancelJobGroup(self._group)
