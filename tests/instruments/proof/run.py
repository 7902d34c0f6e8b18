"""`make prove`: a round of each kind of proof, and the page of all records.

    python -m proof.run --minutes 10 [--only simulation,soak] [--seed N] [--share 0/1] [-- ARGUMENTS OF ITS PROGRAM]
    python -m proof.run --page

Each round is a program of its own, which writes a record; the page is written from the records that are there.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from nemesis.hosts import missing
from proof.page import write_page
from proof.record import RECORDS, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PLANS_IN: Final = 64
MUTANTS_IN: Final = 32
KILLS_A_MINUTE: Final = 4
OPTIONS_KILLS_A_MINUTE: Final = 2
CONNECT_KILLS_A_MINUTE: Final = 2
ENDLESS: Final = 10**6


@dataclass(frozen=True)
class Round:
    """A program, after ``python -m``, with its arguments, and its environment besides."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def _kills(test: str, a_minute: int, minutes: float, seed: int, records: str) -> Round:
    kills = max(4, round(minutes * a_minute))
    settings = {"EPOCHSINK_KILLS": str(kills), "EPOCHSINK_SEED": str(seed), "EPOCHSINK_RECORDS": records}
    return Round(["pytest", "-q", "-n", "0", f"tests/failure/{test}.py"], settings)


def _share(seed: int, each: int) -> dict[str, str]:
    return {"EPOCHSINK_SHARE": f"{seed % each}/{each}"}


ROUNDS: Final[dict[str, Callable[[float, int, str], Round]]] = {
    "simulation": lambda minutes, seed, records: Round(
        ["simulation.explore", f"--minutes={minutes}", f"--seed={seed}", "--processes=2", f"--keep={records}"]
    ),
    "kills": partial(_kills, "test_random_kills_kafka", KILLS_A_MINUTE),
    "connect": partial(_kills, "test_connect", CONNECT_KILLS_A_MINUTE),
    "options": lambda minutes, seed, records: Round(
        [
            "proof.options",
            f"--kills={max(4, round(minutes * OPTIONS_KILLS_A_MINUTE))}",
            f"--seed={seed}",
            f"--keep={records}",
        ]
    ),
    "requests": lambda minutes, seed, records: Round(
        ["request_faults.run", f"--minutes={minutes}", f"--keep={records}"], _share(seed, PLANS_IN)
    ),
    "pairs": lambda minutes, seed, records: Round(
        ["request_faults.run", f"--minutes={minutes}", f"--pairs={ENDLESS}", f"--seed={seed}", f"--keep={records}"]
    ),
    "mutants": lambda _, seed, records: Round(["mutants.run", f"--keep={records}"], _share(seed, MUTANTS_IN)),
    "soak": lambda minutes, seed, records: Round(
        ["nemesis.run", f"--hours={minutes / 60}", f"--seed={seed}", f"--keep={records}"]
    ),
    "scoreboard": lambda _, seed, __: Round(["scoreboard.run", f"--seed={seed}"]),
    "stores": lambda _, seed, __: Round(["proof.stores", f"--seed={seed}"]),
}
"""What one round of each kind runs. That of the mutants takes a 32nd of them, however long that is."""
BY_NAME: Final = {"scoreboard", "stores"}
"""Those that download what nothing else needs, and that keep no record: run only if they are named."""


def main() -> int:
    """Run what the command line says; return 1 if any of it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each round (default: %(default)s)")
    parser.add_argument(
        "--only",
        default=",".join(name for name in ROUNDS if name not in BY_NAME),
        help="which rounds, with commas (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--share", help="of the plans or mutants that a round takes a share of: 0/1 for all, 3/16")
    parser.add_argument("arguments", nargs="*", help="passed on to the programs of the rounds")
    parser.add_argument("--keep", type=Path, default=RECORDS, help="the folder of the records; the page is beside it")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from the records")
    chosen = parser.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    console, failed = Console(), []
    for name in [] if chosen.page else chosen.only.split(","):
        if name == "soak" and (absent := missing()):
            console.print(f"no soak: {absent}", style="yellow")
            continue
        console.print(f"{name}, seed {chosen.seed}", style="bold")
        one = ROUNDS[name](chosen.minutes, chosen.seed, str(chosen.keep.absolute()))
        command = [sys.executable, "-m", *one.command, *chosen.arguments]
        environment = {**os.environ, **one.environment}
        if chosen.share and "EPOCHSINK_SHARE" in one.environment:
            environment["EPOCHSINK_SHARE"] = chosen.share
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    console.print(f"the page: {write_page(chosen.keep)}", soft_wrap=True)
    if failed:
        console.print(f"not as it should be: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
