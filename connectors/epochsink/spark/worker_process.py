"""What costs time in PySpark's worker processes, on the executors, and can be had without it: a task calls it."""

from __future__ import annotations

import ctypes
import gc
import socket
import sys
import zipimport
from contextlib import suppress
from pathlib import Path
from typing import Final

_OPEN_FILES: Final = Path("/proc/self/fd")


def acknowledge_at_once() -> None:
    """Let Linux acknowledge at once what Spark has sent to this process, which brings the rows 40 ms sooner.

    Spark sends what a task is to do, and then its rows. Its socket has Nagle's algorithm on: the rows wait in the JVM
    until the first is acknowledged. Linux puts that off by 40 ms, to send it with an answer, and a task has none yet.
    Later versions of Spark may use a Unix socket, which needs none of this.
    """
    option = getattr(socket, "TCP_QUICKACK", None)
    if option is None:
        return  # not Linux
    # not by objects of Python's, which may make a socket non-blocking for whoever else has it
    set_option, yes = ctypes.CDLL(None).setsockopt, ctypes.c_int(1)
    with suppress(OSError):  # without /proc the rows come later, and nothing else changes
        for file in _OPEN_FILES.iterdir():
            # PySpark keeps its socket to itself. Others lose nothing by it, and what is no TCP socket refuses it
            set_option(int(file.name), socket.IPPROTO_TCP, option, ctypes.byref(yes), ctypes.sizeof(yes))


def spare_collector() -> None:
    """Let Python's garbage collector skip the modules of this process; again after it has loaded more of them.

    PySpark collects garbage after each task, which takes 15 ms for modules that stay loaded anyway.
    """
    global _modules  # noqa: PLW0603 - of the process, as the collector is
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


_modules = 0


def forget_archives() -> None:
    """Drop Python's finders of zip archives. Python makes them again when it imports from an archive.

    PySpark is sent to its workers as an archive, and invalidates all finders before each task. Then each finder of an
    archive, of which there are a dozen, reads the whole directory again: a tenth of a second of each task.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]
