"""Sends records with their time of creation into a topic, and notes when a reader of the target sees each of them.

Run as ``python latency_probe.py SPEC`` (JSON, see `Spec`), in a process of its own, so that it takes no turn of the
driver's Python. Its last line of output is a JSON list: each record's milliseconds from creation until it was seen.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import elasticsearch
import psycopg
from confluent_kafka import Consumer, Producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VALUE_BYTES: Final = 100
TICK_SECONDS: Final = 0.005
"""Records are sent this often, those that are due by then."""
PAUSE_SECONDS: Final = 0.005
"""Between two looks of a reader that has to ask; no record seems older by more than this and the look's own time."""
LAST_SECONDS: Final = 60.0
"""How long the reader waits for the last records."""


@dataclass(frozen=True)
class Spec:
    """``kind`` and ``target`` name what is read: a topic (``server``: a broker), a table (a DSN), an index (a URL)."""

    servers: str
    source: str
    rate: int
    records: int
    kind: str
    server: str
    target: str


Seen = list[tuple[int, int]]
"""Number of a record, and its time of creation (microseconds since 1970)."""


def topic(spec: Spec, stack: ExitStack) -> Callable[[], Iterable[tuple[int, int]]]:
    """Return what reads the newest records of a topic, as read_committed readers see them."""
    options = {"isolation.level": "read_committed", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 10}
    consumer = Consumer({"bootstrap.servers": spec.server, "group.id": "latency", **options})
    stack.enter_context(closing(consumer))
    consumer.subscribe([spec.target])

    def look() -> Seen:
        values = [message.value() or b"" for message in consumer.consume(1000, 0.005) if message.error() is None]
        return [(int(number), int(created)) for number, created, _ in (value.split() for value in values)]

    return look


def table(spec: Spec, stack: ExitStack) -> Callable[[], Iterable[tuple[int, int]]]:
    """Return what asks a table for the rows after the first that is missing."""
    connection = stack.enter_context(psycopg.connect(spec.server, autocommit=True))
    question = f"SELECT id, created FROM {spec.target} WHERE id >= %s"  # noqa: S608 - our own name
    return _asked(lambda low: connection.execute(question, (low,)).fetchall())


def index(spec: Spec, stack: ExitStack) -> Callable[[], Iterable[tuple[int, int]]]:
    """Return what searches an index for the documents after the first that is missing."""
    client = stack.enter_context(elasticsearch.Elasticsearch(spec.server))

    def search(low: int) -> Seen:
        newer = {"range": {"id": {"gte": low}}}
        fields = ["id", "created"]
        answer = client.search(
            index=spec.target,
            query=newer,
            size=10_000,
            sort="id",
            source=False,
            docvalue_fields=[{"field": name} for name in fields],
        )
        return [tuple(hit["fields"][name][0] for name in fields) for hit in answer["hits"]["hits"]]

    return _asked(search)


def _asked(ask: Callable[[int], Seen]) -> Callable[[], Iterable[tuple[int, int]]]:
    low, above = 0, set[int]()

    def look() -> Seen:
        nonlocal low
        time.sleep(PAUSE_SECONDS)
        new = [(number, created) for number, created in ask(low) if number not in above]
        above.update(number for number, _ in new)
        while low in above:
            above.remove(low)
            low += 1
        return new

    return look


READERS: Final = {"topic": topic, "table": table, "index": index}


def send(spec: Spec) -> None:
    """Send all records, each as soon as it is due."""
    producer = Producer({"bootstrap.servers": spec.servers, "linger.ms": 0})
    begun = time.monotonic()
    for number in range(spec.records):
        while (early := begun + number / spec.rate - time.monotonic()) > 0:
            producer.poll(0)
            time.sleep(max(early, TICK_SECONDS))
        producer.produce(spec.source, f"{number} {time.time_ns() // 1000} ".ljust(VALUE_BYTES, "x").encode())
    producer.flush()


def ages(spec: Spec) -> list[float]:
    """Send the records and read the target; return each record's milliseconds. Raises if one is missing or doubled."""
    found: list[float | None] = [None] * spec.records
    left = spec.records
    with ExitStack() as stack:
        look = READERS[spec.kind](spec, stack)
        look()
        sender = threading.Thread(target=send, args=(spec,))
        sender.start()
        deadline = time.monotonic() + spec.records / spec.rate + LAST_SECONDS
        while left and time.monotonic() < deadline:
            new = look()
            now = time.time()
            for number, created in new:
                if found[number] is not None:
                    raise AssertionError(f"record {number} was seen twice")
                found[number] = now * 1000 - created / 1000
                left -= 1
        sender.join()
    if left:
        raise AssertionError(f"{left} of {spec.records} records were not seen in {LAST_SECONDS:.0f} s after the last")
    return [age for age in found if age is not None]


def main() -> None:
    """Do what the argument says."""
    sys.stdout.write(json.dumps([round(age, 1) for age in ages(Spec(**json.loads(sys.argv[1])))]) + "\n")


if __name__ == "__main__":
    main()
