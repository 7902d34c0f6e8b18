"""Plays every plan with one fault at one request, or pairs of faults at random, and prints what they have shown.

EPOCHSINK_SHARE=3/16 python -m request_faults.run --of postgres,elasticsearch
python -m request_faults.run --pairs 200 --seed 7
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kafka_proxy import listener
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shares import SHARE, Share

from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres
from epochsink_devkit.services.ports import free_port
from proof.record import ROOT, Record
from request_faults import guards
from request_faults.families import ElasticsearchSide, KafkaSide, PostgresSide
from request_faults.runner import REPLAY, STORIES, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.queues import Queue

    from request_faults.runner import Plan, Side, Story, Verdict


@dataclass(frozen=True)
class Result:
    """One played plan, as a worker tells it."""

    of: str
    story: str
    struck: bool
    flaw: str
    seconds: float
    entries: int = 0


def _postgres(stack: ExitStack, way: Mapping[str, Any], tables: int = 1) -> Side:
    server = stack.enter_context(LocalPostgres())
    return PostgresSide(server.dsn, server.port, way=way, tables=tables)


def _kafka(stack: ExitStack) -> Side:
    # a second listener, whose advertised port is that of the proxy
    through, proxy = free_port(), free_port()
    server = stack.enter_context(LocalKafka(listener(through, proxy), short_lived=True))
    return KafkaSide(server.bootstrap_servers, through, proxy)


def _elasticsearch(stack: ExitStack) -> Side:
    server = stack.enter_context(LocalElasticsearch(short_lived=True))
    return ElasticsearchSide(server.url, server.port)


SIDES: Final[dict[str, Callable[[ExitStack], Side]]] = {
    "postgres": lambda stack: _postgres(stack, {"commit": "prepared"}),
    "postgres-staged": lambda stack: _postgres(stack, {"commit": "staged"}),
    "postgres-by-task": lambda stack: _postgres(stack, {"atomic": False}),
    "postgres-shared": lambda stack: _postgres(stack, {"commit": "prepared"}, 2),
    "kafka": _kafka,
    "elasticsearch": _elasticsearch,
}
"""What is played, and how its server is started."""


def stories(of: str) -> tuple[Story, ...]:
    """Return the stories of a kind of target: Elasticsearch prepares nothing that could be lost.

    Two sinks that share a transaction differ from one where they are prepared, first or again.
    """
    if of == "postgres-shared":
        return STORIES[0], REPLAY
    return STORIES if of == "elasticsearch" else (*STORIES, REPLAY)


@dataclass(frozen=True)
class Asked:
    """What to play: a share of the plans with one fault, or so many ``pairs`` of each kind of target, of a seed.

    Nothing new begins after ``seconds`` for each kind of target. One of ``workers`` plays its part.
    """

    of: tuple[str, ...]
    share: Share = SHARE
    pairs: int = 0
    seed: int = 0
    seconds: float = float("inf")
    worker: int = 0
    workers: int = 1

    def plans(self, of: str, runner: Runner) -> Iterator[Plan]:
        """Yield the plans of this worker."""
        if not self.pairs:
            for story in stories(of):
                # by name: each worker lists the requests anew, and there may be one more or less of those that wait
                for plan in self.share.of(runner.plans(story)):
                    if zlib.crc32(str(plan).encode()) % self.workers == self.worker:
                        yield plan
            return
        sources = [
            runner.pairs(story, random.Random(f"{self.seed} {of} {story.name} {self.worker}")) for story in stories(of)
        ]
        for number in range(self.worker, self.pairs, self.workers):
            yield next(sources[number // self.workers % len(sources)])


def play(of: str, asked: Asked) -> Iterator[Result]:
    """Play one worker's part of what is asked for, of one kind of target."""
    with ExitStack() as stack:
        side = SIDES[of](stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner = stack.enter_context(Runner(side, folder))
        deadline = time.monotonic() + asked.seconds
        for plan in asked.plans(of, runner):
            if time.monotonic() > deadline:
                return
            try:
                verdict: Verdict = runner.play(plan)
            except Exception as failure:  # noqa: BLE001 - the plan is named, and the others are played
                yield Result(of, plan.story.name, struck=True, flaw=f"{plan}: {failure!r}", seconds=0.0)
            else:
                flaw = str(verdict) if verdict.flaws else ""
                yield Result(of, plan.story.name, verdict.struck, flaw, verdict.seconds, verdict.entries)


def _work(asked: Asked, results: Queue[Result | str | None]) -> None:
    try:
        for one in asked.of:
            for result in play(one, asked):
                results.put(result)
    except BaseException as failure:  # noqa: BLE001 - told to the parent
        results.put(f"{failure!r}")
    results.put(None)


Counts = dict[tuple[str, str], Counter[str]]


def main() -> int:
    """Play, print each flaw as it is found and a table at the end; return 1 if there was any."""
    given = arguments()
    of = tuple(given.of.split(","))
    asked = Asked(of, SHARE, given.pairs, given.seed, 60 * given.minutes / len(of), 0, given.workers)
    console = Console()
    # the share alone stands for every kind of target
    seed = str(SHARE) if given.of == ",".join(SIDES) else f"{SHARE} of {given.of}"
    record = Record("request fault pairs", given.seed) if given.pairs else Record("request faults", seed)
    if given.pairs:
        console.print(f"seed {given.seed}")
    if given.guards:
        os.environ[guards.VARIABLE] = str(given.guards.absolute())
    counts, anomalies = gathered(asked, console)
    table = Table("target", "story", "plans", "struck", "flaws", caption=f"{record.seconds:.0f} s")
    for (target, story), count in counts.items():
        table.add_row(target, story, *(str(count[name]) for name in ("plans", "struck", "flaws")))
    console.print(table)
    if given.guards:
        console.print("no plan reached:", *guards.unreached(given.guards), sep="\n", markup=False, highlight=False)
    if given.keep:
        whole = sum(counts.values(), Counter[str]())
        figures = {
            **{name: whole[name] for name in ("plans", "struck")},
            "ledger entries": whole["entries"],
            "of": [{"target": target, "story": story, **count} for (target, story), count in sorted(counts.items())],
            "anomalies": anomalies,
            **({"guards": sorted(guards.reached(given.guards))} if given.guards else {}),
        }
        console.print(f"the record: {record.keep(given.keep, figures)}", soft_wrap=True)
    return 1 if anomalies or not counts else 0


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default=",".join(SIDES), help="what to play, with commas")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with servers of its own")
    parser.add_argument("--pairs", type=int, default=0, help="so many plans with two faults of each, at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the pairs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--guards", type=Path, help="a file for the guards that plans reach; lists the others")
    parser.add_argument("--keep", type=Path, help="a folder for the record of the run")
    return parser.parse_args()


def gathered(asked: Asked, console: Console) -> tuple[Counts, list[str]]:
    """Play in processes; return the counts by target and story, and what is wrong."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Result | str | None] = context.Queue()
    workers = [context.Process(target=_work, args=(replace(asked, worker=me), results)) for me in range(asked.workers)]
    for worker in workers:
        worker.start()
    counts: Counts = {}
    left, anomalies = len(workers), list[str]()
    with Progress(console=console) as progress:
        task = progress.add_task("plans", total=None)
        while left:
            result = results.get(timeout=600)
            if result is None:
                left -= 1
                continue
            if isinstance(result, Result):
                count = counts.setdefault((result.of, result.story), Counter())
                count.update(plans=1, struck=int(result.struck), flaws=int(bool(result.flaw)), entries=result.entries)
                progress.update(task, advance=1, description=f"{result.of}: {result.story}")
            wrong = result.flaw if isinstance(result, Result) else f"a worker has failed: {result}"
            if wrong:
                # the record must not name where this checkout is
                anomalies.append(wrong.replace(f"{ROOT}/", ""))
                console.print(wrong, markup=False, highlight=False)
    for worker in workers:
        worker.join(60)
    return counts, anomalies


if __name__ == "__main__":
    sys.exit(main())
