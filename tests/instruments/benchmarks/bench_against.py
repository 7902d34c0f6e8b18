"""`make bench ONLY=against OLD=other/connectors`: rows into each target, by this code and by another version, in turn.

A ratio is the other version's time of an epoch over ours, the median over the turns; all else is the same: Spark, the
servers, the rows.
"""

from __future__ import annotations

import argparse
import statistics
import uuid
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import elasticsearch
import psycopg
from bench_epoch import AIM_AGAINST, Side
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from epoch_worker import Request
from measure import console

import epochsink
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable

    from epoch_worker import Answer

KEYS: Final = 50_000
"""Upserts insert these first, then update them; every tenth row deletes its key."""


def targets(stack: ExitStack, names: list[str]) -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Start the servers; return the sink's class of each way that is asked for, and what makes a run's arguments."""
    found: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {}
    if any(name.startswith("postgres") for name in names):
        server = stack.enter_context(LocalPostgres())
        found["postgres-append"] = ("Postgres", lambda: _table(server.dsn, ""))
        found["postgres-append-by-task"] = ("Postgres", lambda: {**_table(server.dsn, ""), "atomic": False})
        keyed = {"key": "id", "select": [f"id % {KEYS} AS id", "payload"], "delete_when": "id % 10 = 0"}
        found["postgres-upsert"] = ("Postgres", lambda: {**_table(server.dsn, "PRIMARY KEY"), **keyed})
    if "kafka" in names:
        broker = stack.enter_context(LocalKafka()).bootstrap_servers
        # by name: without one it ends before it has answered
        admin = AdminClient({"bootstrap.servers": broker})
        admin.create_topics([NewTopic("bench", 4)])["bench"].result(30)
        found["kafka"] = ("Kafka", lambda: {"bootstrap_servers": broker, "topic": "bench"})
    if "elasticsearch" in names:
        url = stack.enter_context(LocalElasticsearch()).url
        with elasticsearch.Elasticsearch(url) as client:
            client.indices.create(index="bench", settings={"number_of_replicas": 0})
        found["elasticsearch"] = ("Elasticsearch", lambda: {"hosts": url, "index": "bench", "key": "id"})
    return found


def _table(dsn: str, constraint: str) -> dict[str, Any]:
    """Make a table for one run: a query that is stopped in mid-epoch keeps its locks until it runs again."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} (id bigint {constraint}, payload text)")
    return {"dsn": dsn, "table": name}


def _request(rows: int, epochs: int, kind: str, arguments: Callable[[], dict[str, Any]]) -> Request:
    return Request(rows, epochs, {kind: arguments()})


def main() -> None:
    """Measure, and print the ratios as the last lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="folder 'connectors' of another checkout")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns over both sides (default: %(default)s)")
    parser.add_argument(
        "--ways",
        default="postgres-append,postgres-append-by-task,postgres-upsert,kafka,elasticsearch",
        help="which, with commas (default: %(default)s)",
    )
    said = parser.parse_args()
    names = said.ways.split(",")
    lines = []
    with ExitStack() as stack:
        known = targets(stack, names)
        sides = {
            "ours": stack.enter_context(closing(Side(Path(epochsink.__file__).parents[1]))),
            "old": stack.enter_context(closing(Side(said.old.resolve()))),
        }
        for name in names:
            request = partial(_request, said.rows, said.epochs, *known[name])
            lines += measured(name, sides, said.rows, request, said.turns)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def measured(name: str, sides: dict[str, Side], rows: int, request: Callable[[], Request], turns: int) -> list[str]:
    """Run both sides in turn, after a warm-up; return the lines to print."""
    found: dict[str, list[Answer]] = {label: [] for label in sides}
    for turn in range(turns + 1):
        labels = list(sides) if turn % 2 else list(reversed(sides))
        for label in labels:
            found[label].append(sides[label].run(request()))
        took = ", ".join(f"{label} {found[label][-1].milliseconds:.0f} ms" for label in sides)
        console.print(f"{name}: {f'turn {turn} of {turns}' if turn else 'warm-up'}: {took}")
    lines = []
    units: dict[str, Callable[[Answer], float]] = {
        "": lambda answer: answer.milliseconds,
        "-processor": lambda answer: answer.processor_milliseconds,
        # of the same plan one JVM takes 0.85 to 1.15 of another's time, for as long as both live: what its compiler
        # made of it. The library runs in Python alone
        "-processor-of-python": lambda answer: sum(spent for name, spent in answer.processes.items() if name != "JVM"),
    }
    for unit, figure in units.items():
        pairs = [(figure(old), figure(ours)) for old, ours in zip(found["old"], found["ours"], strict=True)]
        ratios = sorted(old / ours for old, ours in pairs[1:])
        old, ours = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
        lines.append(
            f"RATIO against-{name}{unit} {statistics.median(ratios):.2f} (aim {AIM_AGAINST}) "
            f"from {ratios[0]:.2f} to {ratios[-1]:.2f}; old {old:.0f} ms, ours {ours:.0f} ms for {rows:,} rows"
        )
    return lines


if __name__ == "__main__":
    main()
