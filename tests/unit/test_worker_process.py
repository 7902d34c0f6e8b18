"""What a task does so that PySpark's worker process waits for nothing that is not needed."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

from epochsink.spark.worker_process import acknowledge_at_once

if TYPE_CHECKING:
    import pytest

COLLECTED = """
import gc
from epochsink.spark.worker_process import spare_collector

before = len(gc.get_objects())
spare_collector()
frozen = gc.get_freeze_count()
spare_collector()
assert gc.get_freeze_count() == frozen > before / 2
import wave  # another module
spare_collector()
assert gc.get_freeze_count() > frozen
"""


def test_the_collector_passes_over_what_a_worker_has_loaded() -> None:
    """In a process of its own: this one's garbage is to be collected."""
    subprocess.run([sys.executable, "-c", COLLECTED], check=True, timeout=60)


def unacknowledged(sender: socket.socket) -> int:
    """Return how many bytes of a connection its peer has not acknowledged."""
    (count,) = struct.unpack("i", fcntl.ioctl(sender, termios.TIOCOUTQ, b"\0" * 4))
    return int(count)


def test_what_has_come_to_a_worker_is_acknowledged_at_once() -> None:
    """Linux has put the acknowledgement off in most rounds; one that is due already has been sent."""
    put_off = 0
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as spark:
        worker, _ = server.accept()
        with worker:
            for _ in range(20):
                # the worker answers, so Linux expects it to do so again and waits for that with the acknowledgement
                spark.sendall(b"task")
                worker.recv(4)
                worker.sendall(b"done")
                spark.recv(4)
                spark.sendall(b"what to do")
                worker.recv(10)
                put_off += unacknowledged(spark) > 0
                acknowledge_at_once()
                assert unacknowledged(spark) == 0
    assert put_off


def test_no_open_file_is_closed_left_open_or_made_non_blocking() -> None:
    first, second = socket.socketpair()
    before = socket.getdefaulttimeout()
    with first, second, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket() as connection:
        socket.setdefaulttimeout(1)  # as a library of the user's may have done
        try:
            files = sorted(Path("/proc/self/fd").iterdir())
            acknowledge_at_once()
            assert sorted(Path("/proc/self/fd").iterdir()) == files
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(connection.fileno())
        first.sendall(b"x")
        assert second.recv(1) == b"x"


def test_a_task_runs_without_a_list_of_open_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("epochsink.spark.worker_process._OPEN_FILES", tmp_path / "none")
    acknowledge_at_once()
