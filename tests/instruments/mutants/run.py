"""`make prove ONLY=mutants`: change the source in one place at a time, and see that the tests named for it fail.

Ends with status 1 if a mutant survives, if its place is not found, or if its tests fail on the code as it is.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from rich.console import Console
from shares import SHARE

from mutants import elasticsearch, kafka, operators, postgres, protocol, spark
from proof.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mutants.mutant import Mutant

ROOT: Final = Path(__file__).parents[3]
FAMILIES: Final[dict[str, list[Mutant]]] = {
    "protocol": protocol.MUTANTS,
    "spark": spark.MUTANTS,
    "kafka": kafka.MUTANTS,
    "postgres": postgres.MUTANTS,
    "elasticsearch": elasticsearch.MUTANTS,
    "operators": operators.MUTANTS,
}
SECONDS: Final = 600
"""For the tests of one mutant: one that hangs for so long is noticed too."""
PASSED, FAILED = 0, 1

_WIDTH: Final = 160

console = Console(width=_WIDTH, highlight=False)


@dataclass(frozen=True, slots=True)
class Ending:
    """How pytest has ended: its status, or None if it has been given up, and the first test that failed."""

    status: int | None
    failure: str = ""

    @property
    def kills(self) -> bool:
        """Whether a test has noticed a mutant. A fixture that fails has not: its service may have lacked a port."""
        return self.status is None or (self.status == FAILED and bool(self.failure))

    def __str__(self) -> str:
        if self.status is None:
            return f"no end within {SECONDS} s"
        return self.failure or f"status {self.status}"


class Copies:
    """Copies of the package, one for each process that tries mutants."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = folder / str(number)
            shutil.copytree(ROOT / "connectors", copy)
            # told from its source by a hash: size and time of a mutant may be those of the source
            compileall.compile_dir(copy, quiet=1, force=True, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
            self._free.put(copy)

    def test(self, tests: str, mutant: Mutant | None = None) -> Ending:
        """Return how pytest ends on a copy that is changed as a mutant says."""
        copy = self._free.get()
        try:
            if mutant is None:
                return _pytest(copy, tests)
            file = copy / "epochsink" / mutant.file
            source = file.read_text()
            file.write_text(source.replace(mutant.old, mutant.new))
            try:
                return _pytest(copy, tests)
            finally:
                file.write_text(source)
        finally:
            self._free.put(copy)


def _pytest(copy: Path, tests: str) -> Ending:
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *shlex.split(tests)]
    # not a pipe: a service that outlives its test would keep it open
    with tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, stdout=output, check=False)
        except subprocess.TimeoutExpired:
            return Ending(None)
        output.seek(0)
        failures = (line.rstrip() for line in output if line.startswith("FAILED "))
        return Ending(ended.returncode, next(failures, "")[:_WIDTH])


def main() -> int:
    """Try them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="which, with commas (default: %(default)s)")
    parser.add_argument("--matching", default="", help="only those whose file, change or harm has this text")
    parser.add_argument("--processes", type=int, default=2, help="how many at once (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for the record of the run")
    said = parser.parse_args()
    chosen = [
        mutant
        for family in said.families.split(",")
        for mutant in FAMILIES[family]
        if said.matching in f"{mutant.file} {mutant.old} {mutant.new} {mutant.harm}"
    ]
    tried = [mutant for mutant in SHARE.of(chosen) if not mutant.equivalent]
    console.print(f"EPOCHSINK_SHARE={SHARE.place}/{SHARE.each}: {len(tried)} mutants")
    faults = [fault for mutant in chosen if (fault := misplaced(mutant))]
    record, killed = Record("mutants", str(SHARE)), 0
    if not faults:
        with tempfile.TemporaryDirectory() as folder:
            faults, killed = run(Copies(Path(folder), said.processes), tried, said.processes)
    for fault in faults:
        console.print(fault, style="bold red", soft_wrap=True, markup=False)
    equivalent = sum(1 for mutant in chosen if mutant.equivalent)
    console.print(
        f"{killed} of {len(chosen)} mutants killed, {len(faults)} faults; {equivalent} equivalent by argument"
    )
    if said.keep:
        figures = {
            "mutants": len(chosen),
            "tried": len(tried),
            "killed": killed,
            "equivalent": equivalent,
            "anomalies": faults,
        }
        console.print(f"the record: {record.keep(said.keep, figures)}", soft_wrap=True)
    return 1 if faults else 0


def misplaced(mutant: Mutant) -> str:
    """Return what is wrong with a mutant's place in the source, if anything is."""
    count = (ROOT / "connectors" / "epochsink" / mutant.file).read_text().count(mutant.old)
    return "" if count == 1 else f"{mutant.file}: {mutant.old!r} stands there {count} times"


def run(copies: Copies, mutants: list[Mutant], processes: int) -> tuple[list[str], int]:
    """Try mutants; return the faults found, and how many were killed. Prints a line for each."""
    faults, killed = [], 0
    began = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        controls = merged({mutant.tests for mutant in mutants})
        for tests, ending in zip(controls, pool.map(copies.test, controls), strict=True):
            if ending.status != PASSED:
                faults.append(f"{tests}: does not pass on the code as it is: {ending}")
        if not faults:
            console.print(f"{time.monotonic() - began:6.0f} s: {len(controls)} sets of tests pass on the code as it is")
        began = time.monotonic()
        results = pool.map(lambda mutant: copies.test(mutant.tests, mutant), mutants if not faults else [])
        for number, (mutant, ending) in enumerate(zip(mutants, results, strict=False), 1):
            killed += ending.kills
            so_far = f"{time.monotonic() - began:6.0f} s, {number} of {len(mutants)}"
            verdict = "killed" if ending.kills else "SURVIVED"
            console.print(f"{so_far}: {verdict}: {mutant.file}: {mutant.harm}", soft_wrap=True, markup=False)
            console.print(f"{'':12}{ending}", soft_wrap=True, markup=False)
            if not ending.kills:
                faults.append(f"survived ({ending}): {mutant}")
    return faults, killed


def merged(sets: Iterable[str]) -> list[str]:
    """Return sets of tests with the same tests in fewer: those of the same files are joined."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="")
    chosen: dict[str, set[str]] = {}
    for tests in sets:
        said, others = parser.parse_known_args(shlex.split(tests))
        chosen.setdefault(shlex.join(others), set()).add(said.k)
    return [
        files if "" in names else f"{files} -k {shlex.quote(' or '.join(f'({name})' for name in sorted(names)))}"
        for files, names in sorted(chosen.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
