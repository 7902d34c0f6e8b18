"""`make bench ONLY=epoch`: what an epoch costs that has few rows or none, and which step of it takes how long.

Each turn runs all sides one after another, and a ratio is the median over the turns. An epoch without rows is compared
with a foreachBatch that writes nothing, one with rows with a foreachBatch that writes them into the same targets by
hand. How soon after its decision an epoch is visible, a reader of each target tells. `--against PATH` names the folder
`connectors` of another checkout: "no change makes an epoch slower" is then a figure. The steps are measured apart,
since to measure them takes time too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elasticsearch
import epoch_steps
import epoch_worker
import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from epoch_worker import Answer, Request
from measure import console, spread
from rich.table import Table
from visibility import Reader

import epochsink
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres, spark_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROWS = (0, 1000)
VISIBLE_ROWS = 100
VISIBLE_AIMS = {"postgres": 50, "kafka": 50, "elasticsearch": 100}
"""Milliseconds from ``commits/N`` until a reader sees the rows, the median of small epochs."""
TRIGGERS = {"back to back": "0 seconds", "two a second": "500 milliseconds"}
AIM_AGAINST = 0.95
"""An epoch may take 5 % longer than in older code."""


class Side:
    """One process with Spark and one version of epochsink."""

    def __init__(self, connectors: Path, tasks: str = "", *, of_spark: Sequence[str] | None = None) -> None:
        """Start it. ``of_spark`` are the worker's arguments, if not Spark's jars."""
        found = os.pathsep.join([str(connectors), str(Path(epoch_worker.__file__).parent)])
        environment = {**os.environ, "PYTHONPATH": found}
        if tasks:
            environment[epoch_steps.TASKS_FILE] = tasks
        arguments = [",".join(map(str, spark_packages()))] if of_spark is None else of_spark
        self._process = subprocess.Popen(
            # other versions have these elsewhere
            [sys.executable, epoch_worker.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, request: Request) -> Answer:
        """Run epochs, and return what each took."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the worker has no pipes")
        stdin.write(json.dumps(asdict(request)) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith(epoch_worker.ANSWER):
                return Answer(**json.loads(line.removeprefix(epoch_worker.ANSWER)))
        raise RuntimeError("the worker has ended: see its errors above")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


TARGETS = ("bench", *(f"visible{number}" for number in range(len(TRIGGERS))))
"""Tables, topics and indices: a reader counts all rows of its own."""


@contextmanager
def postgres() -> Iterator[dict[str, Any]]:
    with LocalPostgres() as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for name in TARGETS:
                connection.execute(f"CREATE TABLE {name} (id bigint, payload text)")
        yield {"dsn": server.dsn, "table": "bench"}


@contextmanager
def kafka() -> Iterator[dict[str, Any]]:
    with LocalKafka() as server:
        # older versions cannot create it; by name, since an admin without one ends before it has answered
        admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
        for made in admin.create_topics([NewTopic(name, 1) for name in TARGETS]).values():
            made.result(30)
        yield {"bootstrap_servers": server.bootstrap_servers, "topic": "bench"}


@contextmanager
def search() -> Iterator[dict[str, Any]]:
    with LocalElasticsearch() as server, elasticsearch.Elasticsearch(server.url) as client:
        for name in TARGETS:
            client.indices.create(index=name)
        yield {"hosts": server.url, "index": "bench", "key": "id"}


SINKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "postgres": ("Postgres", postgres),
    "kafka": ("Kafka", kafka),
    "elasticsearch": ("Elasticsearch", search),
}


def main() -> None:
    """Measure, and print the ratios as the last lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="folder 'connectors' of another checkout")
    parser.add_argument(
        "--sinks",
        default="postgres postgres,kafka,elasticsearch",
        help="which together, with commas; several such sets with spaces (default: %(default)s)",
    )
    parser.add_argument(
        "--parts", default="compare steps visible", help="what to measure, with spaces (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="rows of an epoch (default: 0 and 1000)")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns over all sides (default: %(default)s)")
    said = parser.parse_args()
    lines = []
    own = Path(epochsink.__file__).parents[1]
    sets = [names.split(",") for names in said.sinks.split()]
    with ExitStack() as stack:
        services = {name: stack.enter_context(SINKS[name][1]()) for name in {each for names in sets for each in names}}
        requests = []
        for names in sets:
            sinks = {SINKS[name][0]: services[name] for name in names}
            requests += [("+".join(names), Request(rows, said.epochs, sinks)) for rows in said.rows]
        if "compare" in said.parts:
            lines += compared(own, said.against, requests, said.turns)
        if "steps" in said.parts:
            with tempfile.TemporaryDirectory() as folder, closing(Side(own, f"{folder}/tasks")) as side:
                for name, request in requests:
                    searchable = replace(
                        request, sinks={kind: _searchable(kind, request.sinks[kind]) for kind in request.sinks}
                    )
                    side.run(searchable)
                    print_steps(f"{name}-{request.rows or 'empty'}", side.run(replace(searchable, steps=True)))
        if "visible" in said.parts:
            with closing(Side(own)) as side:
                lines += [
                    line for name, target in services.items() for line in visible(side, name, target, said.epochs)
                ]
    for line in lines:
        console.print(line, highlight=False)


def compared(own: Path, against: Path | None, requests: list[tuple[str, Request]], turns: int) -> list[str]:
    """Compare ours with a plain foreachBatch, and with older code."""
    lines = []
    with closing(Side(own)) as ours, ExitStack() as stack:
        older = stack.enter_context(closing(Side(against.resolve()))) if against else None
        for name, request in requests:
            plain = replace(request, by_hand=True) if request.rows else replace(request, sinks={})
            sides = {"ours": (ours, request), "plain": (ours, plain)}
            if older is not None:
                sides["against"] = (older, request)
            lines += measured(f"{name}-{request.rows or 'empty'}", sides, turns)
    return lines


def visible(side: Side, name: str, target: dict[str, Any], epochs: int) -> list[str]:
    """Return how long a reader waits after ``commits/N``, with epochs back to back and with pauses in between."""
    kind, lines = SINKS[name][0], []
    for (label, trigger), own in zip(TRIGGERS.items(), TARGETS[1:], strict=True):
        given = {key: own if value == TARGETS[0] else value for key, value in target.items()}
        with Reader(kind, given) as reader:
            answer = side.run(Request(VISIBLE_ROWS, epochs, {kind: _searchable(kind, given)}, trigger=trigger))
        delays = reader.delays({int(epoch): at for epoch, at in answer.decided.items()}, VISIBLE_ROWS)
        lines.append(f"VISIBLE {name} {label}: {spread(delays)} (aim {VISIBLE_AIMS[name]} ms)")
        console.print(lines[-1], highlight=False)
    return lines


def _searchable(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    return given | {"refresh": True} if kind == "Elasticsearch" else given


def measured(name: str, sides: dict[str, tuple[Side, Request]], turns: int) -> list[str]:
    """Run all sides in turn; return the lines to print."""
    for side, request in sides.values():
        side.run(request)
    found: dict[str, list[Answer]] = {label: [] for label in sides}
    for turn in range(turns):
        # no side is always the first after a pause
        labels = list(sides)[turn % len(sides) :] + list(sides)[: turn % len(sides)]
        for label in labels:
            side, request = sides[label]
            found[label].append(side.run(request))
        console.print(
            f"{name} turn {turn + 1}: " + ", ".join(f"{label} {_shown(found[label][-1:])}" for label in sides)
        )
    lines = [f"EPOCH {name} {label} {_shown(answers)}" for label, answers in found.items()]
    extra = [one.milliseconds - plain.milliseconds for one, plain in zip(found["ours"], found["plain"], strict=True)]
    lines.append(f"EPOCH {name} ours over plain {statistics.median(extra):.0f} ms")
    if "against" in found:
        for what in ("milliseconds", "processor_milliseconds"):
            ratios = [
                getattr(old, what) / getattr(new, what)
                for new, old in zip(found["ours"], found["against"], strict=True)
            ]
            label = f"epoch-{name}" + ("-processor" if what != "milliseconds" else "")
            lines.append(f"RATIO {label} {statistics.median(ratios):.2f} (aim {AIM_AGAINST})")
    return lines


def print_steps(name: str, answer: Answer) -> None:
    """Print what each step of an epoch takes, in the driver and in a task."""
    title = f"{name}: an epoch's steps, medians ({answer.milliseconds:.0f} ms a trigger; commits/N seen after"
    table = Table(title=f"{title} {answer.seen_after:.1f} ms)")
    table.add_column("in the driver")
    for heading in ("ms", "processor ms", *epoch_steps.COUNTS):
        table.add_column(heading, justify="right")
    for depth, step, *figures in answer.steps:
        table.add_row(
            "  " * depth + step, *(f"{figure:.1f}" for figure in figures[:2]), *map("{:.0f}".format, figures[2:])
        )
    console.print(table)
    for title, told in (("in a task", answer.tasks), ("processor ms of", answer.processes)):
        table = Table(title=name)
        table.add_column(title)
        table.add_column("ms", justify="right")
        for step, milliseconds in told.items():
            table.add_row(step, f"{milliseconds:.1f}")
        console.print(table)


def _shown(answers: list[Answer]) -> str:
    wall = statistics.median(answer.milliseconds for answer in answers)
    processor = statistics.median(answer.processor_milliseconds for answer in answers)
    return f"{wall:.0f} ms, processor {processor:.0f} ms"


if __name__ == "__main__":
    main()
