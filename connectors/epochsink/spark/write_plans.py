"""The write job of an epoch, planned: what does not change from epoch to epoch is made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochsink.spark.compat import arrow_function, map_in_arrow, schema_text
from epochsink.spark.executor_check import with_same_version
from epochsink.spark.query_plan import OnePass, one_pass, row_schemas
from epochsink.spark.write_task import ANSWER, WriteJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from epochsink.protocol.spool import NoSpool, Spool
    from epochsink.sink import Identity, Sink


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The write job of an epoch: a frame of what its tasks answer, and the schemas of the sinks' rows, by name."""

    answers: DataFrame
    schemas: Mapping[str, pa.Schema]


class WritePlans:
    """Plans the write jobs of a run. Has a thread of its own: Spark plans while a target is asked."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        identity: Callable[[str], Identity],
        spool: Spool | NoSpool,
        *,
        show_values: bool = False,
    ) -> None:
        self._show_values = show_values
        self._sinks = sinks
        self._identity = identity
        self._spool = spool
        self._passes: dict[str, OnePass] = {}
        self._function: Any = None
        # one for the run: the JVM has a thread and a connection for each thread that calls it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epochsink-plan")

    @contextmanager
    def planned(self, frame: DataFrame) -> Iterator[Future[WritePlan]]:
        """Give the plan of the write job for a frame: ready, or failed, once the body has ended."""
        plan = self._thread.submit(self.plan, frame)
        try:
            yield plan
        finally:
            wait([plan])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def plan(self, frame: DataFrame) -> WritePlan:
        """Return the plan of the write job for a frame."""
        key = schema_text(frame)
        if key not in self._passes:
            self._passes[key] = one_pass(self._sinks, row_schemas(frame, self._sinks))
        passed = self._passes[key].apply(frame)
        if self._function is None:
            identities = {name: self._identity(name) for name in self._sinks}
            jobs = WriteJobs(self._sinks, identities, self._spool, self._show_values)
            self._function = arrow_function(with_same_version(jobs.write_partition), ANSWER)
        return WritePlan(map_in_arrow(passed, self._function), self._passes[key].schemas)
