"""`ElasticsearchServer` over a cluster in memory: each request is a step, where a fault may strike."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.elasticsearch.errors import NoAnswer
from epochsink.elasticsearch.server import DocumentPlace, ElasticsearchServer, Page, StoredDocument, Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from simulation.memory_elasticsearch import Cluster
    from simulation.steps import Stepper

    Json = Mapping[str, Any]

SECONDS = 0.02
"""What a step takes."""


class StepClock:
    """The time of a simulated process is the number of steps; it does not wait."""

    def __init__(self, steps: Callable[[], int], apart: Callable[[], float]) -> None:
        self._steps, self._apart = steps, apart

    def time(self) -> float:
        """Return the seconds since the simulation began, those between two checkpoints among them."""
        return self.monotonic() + self._apart()

    def monotonic(self) -> float:
        """Return the seconds of the steps."""
        return self._steps() * SECONDS

    def sleep(self, seconds: float, /) -> None:
        """Go on at once."""


class AtOnce(Executor):
    """Carries out at once what it is given, in the thread that gives it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Carry it out. The end of the process ends this, too."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)
        return future


class NoWaiting(threading.Event):
    """An event for which nobody waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Go on at once."""
        del timeout
        return self.is_set()


class OneThread(Threads):
    """Sends one request after another."""

    def pool(self, count: int, name: str) -> Executor:
        """Return what carries out at once."""
        del count, name
        return AtOnce()

    def event(self) -> threading.Event:
        """Return an event for which nobody waits."""
        return NoWaiting()


class MemoryServer(ElasticsearchServer):
    """A cluster in memory, as one process reaches it."""

    def __init__(self, cluster: Cluster, step: Stepper, letter: str = "") -> None:
        self.threads = OneThread()
        self._cluster = cluster
        self._step = step
        self._letter = letter

    def _play(self, request: str, *given: Any, reads: bool = False, **options: Any) -> Any:
        apply = partial(getattr(self._cluster, request), *given, **options)
        try:
            answer = self._step(f"{self._letter} {request}", apply, reads=reads)
        except OSError as error:
            raise NoAnswer(str(error)) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Do nothing."""

    def read(self, index: str, name: str) -> StoredDocument | None:
        """Return a document."""
        found: StoredDocument | None = self._play("read", index, name, reads=True)
        return found

    def write(self, index: str, name: str, source: Json, *, over: DocumentPlace | None) -> DocumentPlace | None:
        """Write a document on a condition."""
        place: DocumentPlace | None = self._play("write", index, name, json.dumps(source), over)
        return place

    def delete(self, index: str, name: str, *, over: DocumentPlace) -> None:
        """Delete a document on a condition."""
        self._play("delete", index, name, over)

    def find(self, index: str | None, names: Iterable[str | Json]) -> list[StoredDocument]:
        """Return the named documents that exist."""
        found: list[StoredDocument] = self._play("find", index, list(names), reads=True)
        return found

    def bulk(
        self, index: str | None, body: bytes, wanted: str, *, refresh: bool = False, pipeline: str | None = None
    ) -> Json:
        """Carry out operations."""
        answer: Json = self._play("bulk", index, body, wanted, refresh=refresh, pipeline=pipeline)
        return answer

    def search(
        self,
        index: str | None,
        query: Json,
        size: int,
        *,
        source: bool = True,
        sort: Sequence[Json] | None = None,
        after: Sequence[Any] | None = None,
        point_in_time: str = "",
    ) -> Page:
        """Return the documents that a query finds."""
        options = {"source": source, "sort": sort, "after": after, "point_in_time": point_in_time}
        page: Page = self._play("search", index, query, size, reads=True, **options)
        return page

    def count(self, index: str, query: Json) -> int:
        """Return how many documents a query finds."""
        return int(self._play("count", index, query, reads=True))

    def highest(self, index: str, field: str) -> int | None:
        """Return the highest value of a field."""
        value: int | None = self._play("highest", index, field, reads=True)
        return value

    def versions(self, indices: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield ``_id`` and version of every document."""
        yield from self._play("versions", indices, reads=True)

    def open_point_in_time(self, index: str) -> str:
        """Keep what an index holds now."""
        return str(self._play("open_point_in_time", index, reads=True))

    def close_point_in_time(self, name: str) -> None:
        """Keep it no longer."""
        self._play("close_point_in_time", name, reads=True)

    def exists(self, index: str) -> bool:
        """Return whether an index exists."""
        return bool(self._play("exists", index, reads=True))

    def create_index(self, index: str, settings: Json | None, mappings: Json | None) -> bool:
        """Create an index."""
        return bool(self._play("create_index", index, settings, mappings))

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Describe indices."""
        described: dict[str, Any] = self._play("describe", names, reads=True)
        return described

    def describe_existing(self, name: str) -> dict[str, Any]:
        """Describe an index."""
        return self.describe([name])

    def settings(self, index: str) -> list[Mapping[str, str]]:
        """Return the settings of an index."""
        return [each["settings"] for each in self.describe([index]).values()]

    def primaries(self, index: str) -> list[int]:
        """Return the number of primary shards."""
        return [int(each["index.number_of_shards"]) for each in self.settings(index)]

    def refresh(self, index: str) -> tuple[int, int]:
        """Make documents searchable."""
        refreshed: tuple[int, int] = self._play("refresh", index)
        return refreshed

    def pipeline(self, name: str) -> Json | None:
        """Return a pipeline that does nothing."""
        return self._play("pipelines_of", name, reads=True)  # type: ignore[no-any-return]

    def data_nodes(self) -> int | None:
        """Return 1; not a step, as it decides nothing but how many requests are sent at once."""
        return 1
