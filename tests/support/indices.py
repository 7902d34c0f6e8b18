"""Two indices of one pipeline: one appends without a key, the other upserts and deletes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from harness import Harness

from epochsink.elasticsearch.applied_epochs import EPOCHS
from epochsink.testing import Target
from epochsink.testing.readers.elasticsearch import ElasticsearchReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from http_proxy import Seen

    from epochsink.devkit.services import KafkaService

BULK_BYTES: Final = 2_500
"""So small that an epoch of 60 rows has six requests for the index without keys and four for the other."""

SETTINGS: Final = {"number_of_shards": 2, "number_of_replicas": 0}


def keyed(url: str, index: str) -> dict[str, Any]:
    """Return the sink of an index that upserts and deletes."""
    options = {"id": "key", "order_by": "kver", "delete_when": "op = 'D'", "bulk_bytes": BULK_BYTES}
    return {"kind": "Elasticsearch", "hosts": url, "index": index, "create": SETTINGS, **options}


def keyless(url: str, index: str) -> dict[str, Any]:
    """Return the sink of an index that appends."""
    return {"kind": "Elasticsearch", "hosts": url, "index": index, "create": SETTINGS, "bulk_bytes": BULK_BYTES}


@contextmanager
def two_indices(folder: Path, kafka: KafkaService, source: str, *, url: str, server: str) -> Iterator[Harness]:
    """Yield a pipeline into "log" and "state", which it reaches by ``url`` and the readers by ``server``."""
    log, state = (f"{name}-{source}" for name in ("log", "state"))
    sinks = {"log": keyless(url, log), "state": keyed(url, state)}
    with Harness(folder, kafka, source, sinks=sinks) as harness:
        harness.read(Target("log", atomic=False), ElasticsearchReader(server, log))
        harness.read(Target("state", atomic=False, keyed=True), ElasticsearchReader(server, state))
        yield harness


def epoch_of(bulk: Seen) -> int | None:
    """Return the epoch that a bulk request belongs to, None if it is only a question."""
    return next((version % EPOCHS for version in bulk.versions), None)
