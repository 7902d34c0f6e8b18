"""How long after ``commits/N`` a reader sees the rows of epoch N: asked of the targets themselves, again and again.

Each epoch has the same number of rows, so how many rows a reader sees says which epochs it sees whole.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import elasticsearch
import psycopg
from beside import Beside
from confluent_kafka import Consumer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAUSE_SECONDS = 0.01
"""Between a reader's looks, which take time of the cores that the query has too; no delay is longer by more."""


class Reader(Beside):
    """Counts the rows of a target in a thread of its own, and notes when there were more than before."""

    def __init__(self, kind: str, target: Mapping[str, Any]) -> None:
        super().__init__(PAUSE_SECONDS)
        self._stack = ExitStack()
        self._count = COUNTS[kind](target, self._stack)
        self._seen: list[tuple[float, int]] = []

    def look(self) -> None:
        """Count once."""
        count = self._count()
        if count > (self._seen[-1][1] if self._seen else 0):
            self._seen.append((time.time(), count))

    def close(self) -> None:
        """Disconnect."""
        self._stack.close()

    def delays(self, decided: Mapping[int, float], rows: int) -> list[float]:
        """Return the milliseconds from each epoch's decision until all of its rows were seen."""
        found = []
        for epoch, since in sorted(decided.items()):
            until = next((at for at, count in self._seen if count >= (epoch + 1) * rows), None)
            if until is not None:
                found.append((until - since) * 1000)
        return found


def _of_postgres(target: Mapping[str, Any], stack: ExitStack) -> Callable[[], int]:
    connection = stack.enter_context(psycopg.connect(target["dsn"], autocommit=True))

    def count() -> int:
        found = connection.execute(f"SELECT count(*) FROM {target['table']}").fetchone()  # noqa: S608 - our own name
        return int(found[0]) if found else 0

    return count


def _of_kafka(target: Mapping[str, Any], stack: ExitStack) -> Callable[[], int]:
    consumer = Consumer(
        {
            "bootstrap.servers": target["bootstrap_servers"],
            "group.id": "visibility",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }
    )
    stack.enter_context(closing(consumer))
    consumer.subscribe([target["topic"]])
    seen = 0

    def count() -> int:
        nonlocal seen
        seen += sum(message.error() is None for message in consumer.consume(1000, 0.005))
        return seen

    return count


def _of_elasticsearch(target: Mapping[str, Any], stack: ExitStack) -> Callable[[], int]:
    client = stack.enter_context(elasticsearch.Elasticsearch(target["hosts"]))
    return lambda: int(client.count(index=target["index"])["count"])


COUNTS: dict[str, Callable[[Mapping[str, Any], ExitStack], Callable[[], int]]] = {
    "Postgres": _of_postgres,
    "Kafka": _of_kafka,
    "Elasticsearch": _of_elasticsearch,
}
