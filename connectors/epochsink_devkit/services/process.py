"""Start, signal, kill and await a service's processes, from the process that owns them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from epochsink.errors import ServiceError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to run and how. `uid`/`gid` None means the caller's; `remove` is a folder to delete if the owner dies."""

    command: Sequence[str]
    log: Path
    cwd: Path
    env: Mapping[str, str]
    uid: int | None = None
    gid: int | None = None
    remove: Path | None = None

    def to_json(self) -> bytes:
        """One line, as supervisor.py reads it."""
        spec = {
            "command": list(self.command),
            "log": str(self.log),
            "cwd": str(self.cwd),
            "env": dict(self.env),
            "uid": self.uid,
            "gid": self.gid,
            "remove": str(self.remove) if self.remove else None,
        }
        return json.dumps(spec).encode() + b"\n"


class SupervisedProcess:
    """One running service under a supervisor process, which ends it if this process dies, even by SIGKILL.

    The constructor starts it. Raises `ServiceError` if the program cannot be run.
    """

    def __init__(self, launch: Launch) -> None:
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only the owner, which stops the service in order
            bufsize=0,
        )
        assert self._supervisor.stdin  # noqa: S101 - for the type checker
        assert self._supervisor.stdout  # noqa: S101 - for the type checker
        self._supervisor.stdin.write(launch.to_json())
        answer = self._supervisor.stdout.readline()
        self._supervisor.stdout.close()
        reply: dict[str, Any] = json.loads(answer) if answer else {"error": "the supervisor process died"}
        if "error" in reply:
            self.release()
            raise ServiceError(f"cannot run {launch.command[0]}: {reply['error']}")
        self.pid: int = reply["pid"]

    @property
    def running(self) -> bool:
        """Whether the service's main process still runs."""
        return self._supervisor.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the main process (128 + n for signal n), None while it runs."""
        return self._supervisor.poll()

    def tree(self) -> list[psutil.Process]:
        """All running processes of the service, the main one first."""
        try:
            below = psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return sorted((p for p in below if _lives(p)), key=lambda process: process.pid != self.pid)

    def send(self, signum: signal.Signals) -> None:
        """Signal the main process, if it runs."""
        self._send_each([p for p in self.tree() if p.pid == self.pid], signum)

    def send_to_all(self, signum: signal.Signals) -> None:
        """Signal every process of the service, including those forked in the meantime."""
        seen: set[psutil.Process] = set()
        while fresh := [process for process in self.tree() if process not in seen]:
            self._send_each(fresh, signum)
            seen.update(fresh)

    def kill(self, timeout: float = 30) -> None:
        """SIGKILL to every process of the service; returns when all are gone, within `timeout` seconds."""
        if self.running:
            self.send_to_all(signal.SIGKILL)
        self.wait(timeout)

    def wait(self, timeout: float) -> int:
        """Wait until all processes are gone, at most `timeout` seconds (subprocess.TimeoutExpired), and clean up."""
        status = self._supervisor.wait(timeout)
        self.release()
        return status

    def release(self) -> None:
        """Close the supervisor's standard input, so that it ends all processes, and wait for the supervisor."""
        if self._supervisor.stdin and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()
        self._supervisor.wait()

    @staticmethod
    def _send_each(processes: list[psutil.Process], signum: signal.Signals) -> None:
        for process in processes:
            try:
                process.send_signal(signum)
            except psutil.NoSuchProcess:
                continue


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
