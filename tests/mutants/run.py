"""`make mutants`: change the source in one place at a time, and see that the tests named for it fail.

Ends with status 1 if a mutant survives, if its place is not found, or if its tests fail on the code as it is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from rich.console import Console
from shares import SHARE

from mutants import elasticsearch, kafka, postgres, protocol, spark

if TYPE_CHECKING:
    from mutants.mutant import Mutant

ROOT: Final = Path(__file__).parents[2]
FAMILIES: Final[dict[str, list[Mutant]]] = {
    "protocol": protocol.MUTANTS,
    "spark": spark.MUTANTS,
    "kafka": kafka.MUTANTS,
    "postgres": postgres.MUTANTS,
    "elasticsearch": elasticsearch.MUTANTS,
}
SECONDS: Final = 600
"""For the tests of one mutant: one that hangs for so long is noticed too."""
PASSED, FAILED, HANGS = 0, 1, 124

console = Console(width=160, highlight=False)


class Copies:
    """Copies of the package, one for each process that tries mutants."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            shutil.copytree(ROOT / "connectors", folder / str(number))
            self._free.put(folder / str(number))

    def status(self, tests: str, mutant: Mutant | None = None) -> int:
        """Return the status that pytest ends with on a copy that is changed as a mutant says."""
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


def _pytest(copy: Path, tests: str) -> int:
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    # bytecode is told from its source by size and time, and a mutant may have both of the source's
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *shlex.split(tests)]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, timeout=SECONDS, stdout=subprocess.DEVNULL, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return HANGS


def main() -> int:
    """Try them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="which, with commas (default: %(default)s)")
    parser.add_argument("--matching", default="", help="only those whose file, change or harm has this text")
    parser.add_argument("--processes", type=int, default=2, help="how many at once (default: %(default)s)")
    said = parser.parse_args()
    chosen = [
        mutant
        for family in said.families.split(",")
        for mutant in FAMILIES[family]
        if said.matching in f"{mutant.file} {mutant.old} {mutant.new} {mutant.harm}"
    ]
    tried = [mutant for mutant in SHARE.of(chosen) if not mutant.equivalent]
    faults = [fault for mutant in chosen if (fault := misplaced(mutant))]
    if not faults:
        with tempfile.TemporaryDirectory() as folder:
            faults = run(Copies(Path(folder), said.processes), tried, said.processes)
    for fault in faults:
        console.print(fault, style="bold red", soft_wrap=True)
    console.print(f"{len(tried)} mutants tried of {len(chosen)}, {len(faults)} not killed", soft_wrap=True)
    return 1 if faults else 0


def misplaced(mutant: Mutant) -> str:
    """Return what is wrong with a mutant's place in the source, if anything is."""
    count = (ROOT / "connectors" / "epochsink" / mutant.file).read_text().count(mutant.old)
    return "" if count == 1 else f"{mutant.file}: {mutant.old!r} stands there {count} times"


def run(copies: Copies, mutants: list[Mutant], processes: int) -> list[str]:
    """Try mutants; return the faults found. Prints a line for each."""
    faults = []
    with ThreadPoolExecutor(processes) as pool:
        controls = sorted({mutant.tests for mutant in mutants})
        for tests, status in zip(controls, pool.map(copies.status, controls), strict=True):
            if status != PASSED:
                faults.append(f"{tests}: ends with status {status} on the code as it is")
        console.print(f"{len(controls)} sets of tests pass on the code as it is" if not faults else "")
        began = time.monotonic()
        results = pool.map(lambda mutant: copies.status(mutant.tests, mutant), mutants if not faults else [])
        for number, (mutant, status) in enumerate(zip(mutants, results, strict=False), 1):
            killed = status in (FAILED, HANGS)
            so_far = f"{time.monotonic() - began:6.0f} s, {number} of {len(mutants)}"
            verdict = "killed" if killed else "SURVIVED"
            console.print(f"{so_far}: {verdict}: {mutant.file}: {mutant.harm}", soft_wrap=True)
            if not killed:
                faults.append(f"survived (status {status}): {mutant}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
