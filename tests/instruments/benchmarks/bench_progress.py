"""`make bench ONLY=progress`: what it costs to follow the progress of a query and to export it.

Compares epochsink with a copy of itself that follows nothing: paired, over epochs without rows and with 1 million. A
ratio of 0.98 says that an epoch takes 2 % longer with progress than without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import bench_epoch

import epochsink

STEPS: Final = (
    "opened closed begin written recorded decided replayed set_aside visible done retried ended failed log_now_and_then"
)
FOLLOWS_NOTHING: Final = f"""

def _nothing(self, *given, **named):
    return None


@contextmanager
def _untimed(self, *given):
    yield


for _step in {STEPS.split()}:
    assert hasattr(ProgressTracker, _step), _step
    setattr(ProgressTracker, _step, _nothing)
ProgressTracker.timed = _untimed
"""
EPOCHS: Final = {0: (40, 9), 1_000_000: (3, 7)}
"""How many epochs a turn has, and how many turns there are."""


def main() -> int:
    """Measure; the ratios are among the last lines of each part."""
    own = Path(epochsink.__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(own, Path(folder) / own.name)
        with (copy / "epochsink" / "protocol" / "progress_tracker.py").open("a") as file:
            file.write(FOLLOWS_NOTHING)
        for rows, (epochs, turns) in EPOCHS.items():
            given = (
                f"--parts compare --sinks postgres --rows {rows} --epochs {epochs} --turns {turns} --against".split()
            )
            subprocess.run([sys.executable, bench_epoch.__file__, *given, str(copy)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
