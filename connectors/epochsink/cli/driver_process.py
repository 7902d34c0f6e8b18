"""Say whether the driver that took a ledger has ended, if it was on this host: a server may not know it yet."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

from epochsink.protocol.ledger_entries import Stamp

_CLOCK_SECONDS: Final = 2.0
"""By how much the start of a process, which the kernel counts from its boot, may be off."""


def has_ended(stamp: Stamp) -> bool:
    """Return whether the process of a stamp is known to have ended: False for one on another host.

    Its number may have been given to another process since, which began after the stamp.
    """
    if stamp.host != socket.gethostname():
        return False
    try:
        os.kill(stamp.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # another user's, but is it the same one?
        pass
    began = _began(stamp.pid) if sys.platform == "linux" else None
    return began is not None and began > stamp.at + _CLOCK_SECONDS


def _began(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970: infinity if it has ended meanwhile; None if not known."""
    try:
        # the name of the program, in brackets, may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except FileNotFoundError:
        return float("inf")
    except (OSError, StopIteration):
        return None
    # a zombie has ended, and its parent has not asked for its status
    if fields[0] in {"Z", "X"}:
        return float("inf")
    return float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
