"""The production's Elasticsearch sink over a cluster in memory: without keys, or with them."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.committer import ElasticsearchCommitter
from simulation.search_server import MemoryServer, StepClock
from simulation.search_target import source_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.sink import Committable, Participant, Task
    from simulation.readers import Row
    from simulation.steps import Stepper
    from simulation.world import World

KEYED = "F"


class SmallRequests(Elasticsearch):
    """A sink with one document in a request."""

    bulk_bytes = 1


@cache
def configured(letter: str, options: int, *, sets_aside: bool) -> SmallRequests:
    """Return the sink as a driver constructs it: each number of options names another ingest pipeline."""
    return SmallRequests(
        "http://memory:9200",
        index=f"index-{letter.lower()}",
        on_rejected="dead_letter" if sets_aside else "stop",
        dead_letter_index=f"letters-{letter.lower()}" if sets_aside else None,
        key="id" if letter == KEYED else None,
        order_by="source" if letter == KEYED else None,
        pipeline=f"options-{options}" if options else None,
    )


@lru_cache(4096)
def batch_of(rows: tuple[Row, ...], *, keyed: bool) -> pa.RecordBatch:
    """Return rows as the JVM renders them."""
    columns = {"source": pa.array([source_of(row) for row in rows])}
    if keyed:
        columns["id"] = pa.array([f'"_id":"key-{row.source % 2}"}}' for row in rows])
        columns["rank"] = pa.array([row.source for row in rows])
    return pa.RecordBatch.from_pydict(columns)


class SearchSink:
    """One sink of one driver."""

    letter = "E"
    group: str | None = None
    sets_aside = False

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None:
        del spool  # always
        self._world, self._options = world, world.options
        self._sink = configured(self.letter, world.options, sets_aside=self.sets_aside)
        target = world.search[self.letter]
        target.refuses |= self.sets_aside and not target.mended
        self._server = MemoryServer(target, world.copying(self.letter, step), self.letter)
        self._clock = StepClock(world.steps, lambda: world.apart)

    def committer(self, server: MemoryServer, clock: StepClock) -> ElasticsearchCommitter:
        """Return the driver's part."""
        return ElasticsearchCommitter({self.letter: self._sink}, lambda: server, clock)

    def participant(self, members: Mapping[str, Any]) -> Participant:
        """Return what the coordinator or a command asks: a new one each time, as it is closed after that."""
        del members  # a sink of this family is alone
        return self.committer(self._server, self._clock)

    def begin(self, task: Task, attempt_number: int = 0) -> SearchTask:
        """Write nothing: the spool does."""
        del attempt_number
        self._world.write_with(task.epoch.attempt, self._options)
        return SearchTask(self._sink.writer(task), keyed=self.letter == KEYED)


class KeyedSearchSink(SearchSink):
    """Each epoch updates the same two documents."""

    letter = KEYED


class RejectedRowsSink(SearchSink):
    """The index refuses every fifth row, which is set aside."""

    sets_aside = True


class SearchTask:
    """A task's writer."""

    def __init__(self, writer: Any, *, keyed: bool) -> None:
        self._writer, self._keyed = writer, keyed

    def write(self, rows: Sequence[Row]) -> None:
        """Check the rows."""
        self._writer.write(batch_of(tuple(rows), keyed=self._keyed))

    def prepare(self) -> Committable:
        """Name the task."""
        part: Committable = self._writer.prepare()
        return part
