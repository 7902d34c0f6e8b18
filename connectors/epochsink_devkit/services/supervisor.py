"""Start one service, and end it when its owner dies. Runs as a small process.

The owner holds the write end of this process's standard input and writes one line of JSON there
(`command`, `log`, `cwd`, `env`, `uid`, `gid`, `remove`). The answer is one line on standard output, `{"pid": n}`
or `{"error": text}`. From then on the open pipe is the only link: end of file, or a different parent, means that the
owner has ended, for whatever reason, and every process below this one is killed.

It runs as a plain script (`python -I -S supervisor.py`), so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PPID_CHECK_SECONDS = 1.0


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process, because PostgreSQL's backends leave their process group."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the service in its own session, with its output appended to the log.

    Raises `OSError` if the program cannot be run.
    """
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    account = {} if spec["uid"] is None else {"user": spec["uid"], "group": spec["gid"], "extra_groups": []}
    try:
        return subprocess.Popen(
            spec["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=spec["cwd"],
            env=spec["env"],
            start_new_session=True,
            **account,
        )
    finally:
        os.close(log)


def reap() -> dict[int, int]:
    """Collect ended children, including adopted orphans; return the wait status by process id."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def living_children() -> list[int]:
    """Return the direct children of this process. Reaps zombies instead of returning them."""
    reap()
    tasks = Path("/proc/self/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def kill_below() -> None:
    """Kill every descendant. When a child dies, this process adopts its children, so repeat until none is left."""
    while children := living_children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(children[0], 0)


def wait_for_end(child: int, owner: int, wake: int) -> tuple[bool, int]:
    """Block until the service or the owner has ended; return (whether the owner has ended, exit status)."""
    while True:
        readable, _, _ = select.select([0, wake], [], [], _PPID_CHECK_SECONDS)
        # If the owner forked without exec, its copy keeps the pipe open; a new parent still shows the owner's death.
        if 0 in readable or os.getppid() != owner:
            return True, 0
        if wake in readable and signal.SIGTERM in os.read(wake, 4096):
            return True, 0
        if child in (ended := reap()):
            return False, os.waitstatus_to_exitcode(ended[child])


def main() -> int:
    """Start, watch and end the service. The exit status is that of the service (128 + n for signal n)."""
    owner = os.getppid()
    become_subreaper()
    wake, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    spec = json.loads(sys.stdin.buffer.readline())
    try:
        child = spawn(spec)
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": str(error)}), flush=True)  # noqa: T201 - the answer
        return 1
    print(json.dumps({"pid": child.pid}), flush=True)  # noqa: T201 - the answer
    owner_gone, status = wait_for_end(child.pid, owner, wake)
    kill_below()
    if owner_gone and spec["remove"]:
        shutil.rmtree(spec["remove"], ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # Do not clean up Popen objects and streams: their processes are already reaped.
    os._exit(main())
