"""Spark's executors, lent to a sink's commit: a job beside the stream, in a group and a scheduler pool of its own."""

from __future__ import annotations

import pickle
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException

from epochsink.sink import NotCarriedOut
from epochsink.spark.error_translation import reason_of
from epochsink.spark.executor_check import with_same_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark import SparkContext

    from epochsink.sink.executors import Answer, Part

POOL: Final = "epochsink"
"""The scheduler's pool: with ``spark.scheduler.mode=FAIR`` it has its own share of the cores, beside the stream's."""
LOOK_SECONDS: Final = 1.0
_SLICES_PER_CORE: Final = 4


class SparkExecutors:
    """The executors of one application (see `epochsink.sink.Executors`)."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context

    def map(self, function: Callable[[Part], Answer], parts: Sequence[Part], patience: float) -> list[Answer]:
        """Run one job, and cancel it where no task of it runs for ``patience`` seconds. Raises `NotCarriedOut`."""
        try:
            job = _Job(self._context, function, parts)
            job.start()
        except (Py4JError, PySparkException, AssertionError, AttributeError, OSError) as failure:
            # PySpark's own words for a session that has ended
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
    """A thread of its own: group and pool of a job are its thread's, and the caller's may be those of a stream."""

    def __init__(self, context: SparkContext, function: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        super().__init__(target=self._work, name="epochsink-executors", daemon=True)
        self._context = context

        def unpacked(part: bytes) -> Any:
            return function(pickle.loads(part))  # noqa: S301 - the driver's own

        self._function = with_same_version(unpacked)
        # as bytes: PySpark unpickles what it hands to a task before the versions are compared
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
            # the JVM is gone, or going: the job's own thread learns it
            return False

    def cancel(self) -> None:
        """End the job; its thread then fails."""
        self._context.cancelJobGroup(self._group)
