"""`make prove ONLY=scoreboard`: kill each system in turn by the same plan, and print and write what became of the rows.

    python -m scoreboard.run [--kills 8] [--seed N] [--only spark-kafka,...] [--keep FOLDER] [--flink PYTHON]

Verdicts are kept in FOLDER/results.json as they come; with the same seed and kills, a run that was interrupted goes on
there. The page in docs/ is written only if every system has a verdict. Status 1 if a system got no verdict, or if
epochsink lost, doubled or showed early a row, or got stuck.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafka_proxy import KafkaProxy
from rich.console import Console

from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres
from scoreboard.game import Plan, Servers, play
from scoreboard.judge import Verdict
from scoreboard.page import PAGE, Result, table, write_page
from scoreboard.systems import SYSTEMS

if TYPE_CHECKING:
    from scoreboard.systems import System


BROKER: Final[dict[str, str | int | bool]] = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000}
"""How often the broker looks for transactions to abort, so that a job need not be down for longer than is meant."""


def is_clean(result: Result) -> bool:
    """Whether a system has a verdict and, if it is epochsink, a perfect one."""
    found = result.verdict
    if found is None:
        return False
    return not result.system.ours or not (found.lost or found.doubled or found.early or found.stuck)


def play_one(system: System, servers: Servers, plan: Plan, folder: Path, console: Console) -> Result:
    """Play one system; a failure of the game itself costs only that system its verdict."""
    folder.mkdir()
    try:
        verdict = play(system, servers, plan, folder, lambda what: console.print(what, markup=False, highlight=False))
    except (ValueError, AssertionError, TimeoutError, OSError) as failure:
        console.print_exception()
        return Result(system, None, f"no verdict, {failure!s:.200}")
    console.print(str(verdict), highlight=False)
    return Result(system, verdict)


class Kept:
    """The verdicts of one plan, in a file."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.json"
        self._plan = {"seed": plan.seed, "kills": len(plan.pauses)}
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        same = all(kept.get(name) == value for name, value in self._plan.items())
        self._verdicts: dict[str, dict[str, int]] = kept["verdicts"] if same else {}

    def get(self, system: System) -> Result | None:
        """Return the verdict on a system, None if there is none yet."""
        found = self._verdicts.get(system.name)
        return None if found is None else Result(system, Verdict(**found))

    def add(self, result: Result) -> None:
        """Keep a verdict."""
        if result.verdict is not None:
            self._verdicts[result.system.name] = asdict(result.verdict)
            self._path.write_text(json.dumps({**self._plan, "verdicts": self._verdicts}, indent=1) + "\n")


def play_all(
    systems: list[System], plan: Plan, kept: Kept, folder: Path, *, flink: Path, console: Console
) -> list[Result]:
    """Play systems in turn; a server starts when the first system needs it."""
    results = []
    with ExitStack() as stack:
        proxy = stack.enter_context(KafkaProxy())
        servers = Servers(stack.enter_context(LocalKafka(BROKER | proxy.listener)), proxy, flink)
        for system in systems:
            if (before := kept.get(system)) is not None:
                console.print(f"{system.title}: judged before", markup=False)
                results.append(before)
                continue
            if system.place == "table" and servers.postgres is None:
                servers = replace(servers, postgres=stack.enter_context(LocalPostgres()))
            if system.place == "index" and servers.elasticsearch is None:
                servers = replace(servers, elasticsearch=stack.enter_context(LocalElasticsearch()))
            results.append(play_one(system, servers, plan, folder / system.name, console))
            kept.add(results[-1])
    return results


def main() -> int:
    """Play everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="", help="names of systems, separated by commas")
    parser.add_argument("--keep", type=Path, default=Path("scoreboard"))
    parser.add_argument("--flink", type=Path, default=Path(sys.prefix) / "flink" / "bin" / "python")
    options = parser.parse_args()
    # an exit ends servers and drivers in order, which a signal would not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = random.randrange(2**32) if options.seed is None else options.seed
    plan, console = Plan.of(seed, options.kills), Console()
    wanted = options.only.split(",") if options.only else [system.name for system in SYSTEMS]
    systems = [system for system in SYSTEMS if system.name in wanted]
    console.print(f"KILLS={options.kills} SEED={seed}: {plan.rows:,} rows for each of {len(systems)} systems")
    with tempfile.TemporaryDirectory(prefix="epochsink-scoreboard-") as folder:
        results = play_all(systems, plan, Kept(options.keep, plan), Path(folder), flink=options.flink, console=console)
    console.print(table(results, plan))
    if len(systems) == len(SYSTEMS) and all(result.verdict for result in results):
        write_page(results, plan, dt.datetime.now(tz=dt.UTC).date().isoformat())
        console.print(f"written: {PAGE.name}")
    return 0 if all(map(is_clean, results)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
