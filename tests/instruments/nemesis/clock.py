"""A wall clock for each host: clock.c is preloaded into its processes, and adds what a file says.

The kernel has no wall clock for a part of the machine: a time namespace shifts only the clocks that count on from boot.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("clock.c")


def build(folder: Path) -> Path | None:
    """Compile what is preloaded; None if this machine has no C compiler, and then no clock can be shifted."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library


class Clock:
    """The clock of one host. ``environment`` is what its processes have to be started with."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environment = (f"LD_PRELOAD={library}", f"NEMESIS_CLOCK={file}")
        file.write_bytes(bytes(8))
        file.chmod(0o644)

    def shift(self, seconds: float) -> None:
        """From now on the clock is so many seconds ahead of the machine's, or behind if negative."""
        # written in place: the processes have mapped the file
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))
