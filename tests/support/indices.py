"""Two indices of one pipeline: one appends without a key, the other upserts and deletes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from harness import Harness

from epochsink.elasticsearch.applied_epochs import EPOCHS
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from http_proxy import Answer, Proxy, Seen

    from epochsink_devkit.services import KafkaService

BULK_BYTES: Final = 2_500
"""So small that an epoch of 60 rows has six requests for the index without keys and four for the other. The pipeline
sets it: it is no option of the sink."""

SLEEP_SECONDS: Final = 240.0
"""More than a second driver needs, less than a test may take."""

RECOVERS_LATE: Final[dict[str, str | int]] = {"gateway.expected_data_nodes": 2, "gateway.recover_after_time": "3s"}
"""Settings of a node that answers for some seconds after its start before it knows its indices."""

SETTINGS: Final = {"number_of_shards": 2, "number_of_replicas": 0}


def keyed(url: str, index: str, **more: Any) -> dict[str, Any]:
    """Return the sink of an index that upserts and deletes."""
    options = {"key": "key", "order_by": "kver", "delete_when": "op = 'D'", "bulk_bytes": BULK_BYTES, **more}
    return {"kind": "Elasticsearch", "hosts": url, "create": SETTINGS, **_target(index, options)}


def keyless(url: str, index: str, **more: Any) -> dict[str, Any]:
    """Return the sink of an index that appends."""
    options = {"create": SETTINGS, "bulk_bytes": BULK_BYTES, **more}
    return {"kind": "Elasticsearch", "hosts": url, **_target(index, options)}


def _target(index: str, options: dict[str, Any]) -> dict[str, Any]:
    """Replace ``parts``, an expression, by indices whose names end with its value."""
    parts = options.pop("parts", None)
    return {"index": index, **options} if parts is None else {"index_by": f"concat('{index}-', {parts})", **options}


@contextmanager
def two_indices(
    folder: Path, kafka: KafkaService, source: str, *, url: str, server: str, **more: Any
) -> Iterator[Harness]:
    """Yield a pipeline into "log" and "state", which it reaches by ``url`` and the readers by ``server``.

    ``more`` are options of both sinks.
    """
    log, state = (f"{name}-{source}" for name in ("log", "state"))
    sinks = {"log": keyless(url, log, **more), "state": keyed(url, state, **more)}
    with Harness(folder, kafka, source, sinks=sinks) as harness:
        every = "-*" if "parts" in more else ""
        harness.read(CheckedTarget("log", atomic=False), ElasticsearchReader(server, log + every))
        harness.read(CheckedTarget("state", atomic=False, keyed=True), ElasticsearchReader(server, state + every))
        yield harness


def epoch_of(bulk: Seen) -> int | None:
    """Return the epoch that a bulk request belongs to, None if it is only a question."""
    return next((version % EPOCHS for version in bulk.versions), None)


class Hold:
    """What a proxy does: hold one bulk request of an epoch back until it is released, and keep what became of it."""

    def __init__(self, proxy: Proxy, index: str, epoch: int) -> None:
        self._proxy = proxy
        self._index = index
        self._epoch = epoch
        self.held = threading.Event()
        self.released = threading.Event()
        self.answered = threading.Event()
        self.answer: Answer | None = None

    def __call__(self, seen: Seen) -> Answer | None:
        """Hold the first request of the epoch for the index."""
        mine = seen.path.startswith(f"/{self._index}/_bulk") or f'"_index":"{self._index}-'.encode() in seen.body
        if self.held.is_set() or not mine or epoch_of(seen) != self._epoch:
            return None
        self.held.set()
        self.released.wait(SLEEP_SECONDS)
        self.answer = self._proxy.forward(seen)
        self.answered.set()
        return self.answer
