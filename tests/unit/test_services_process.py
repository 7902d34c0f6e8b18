"""A service's processes end with their owner, however it went and wherever they moved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from waiting import wait_until

from epochsink.errors import ServiceError
from epochsink_devkit.services.process import Launch, SupervisedProcess

if TYPE_CHECKING:
    from pathlib import Path

# Like PostgreSQL's backends, the second sleep leaves the process group and the session of the first shell.
FAMILY = ["sh", "-c", "setsid sleep 1000 & sleep 1000 & wait"]


def launch(folder: Path, command: list[str]) -> Launch:
    return Launch(command=command, log=folder / "log", cwd=folder, env={"PATH": os.environ["PATH"]})


def family_of_three(process: SupervisedProcess) -> list[psutil.Process]:
    wait_until(lambda: [p.name() for p in process.tree()].count("sleep") == 2)
    return process.tree()


def test_kill_ends_processes_that_left_the_process_group(tmp_path: Path) -> None:
    process = SupervisedProcess(launch(tmp_path, FAMILY))
    family = family_of_three(process)
    assert family[0].pid == process.pid
    process.kill()
    assert not any(p.is_running() for p in family)
    assert not process.running


def test_the_end_of_the_main_process_ends_the_others(tmp_path: Path) -> None:
    """A server killed from outside leaves nothing behind that would hold its port or its data."""
    process = SupervisedProcess(launch(tmp_path, FAMILY))
    family = family_of_three(process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not any(p.is_running() for p in family)


def test_pause_stops_every_process_and_resume_lets_all_go_on(tmp_path: Path) -> None:
    process = SupervisedProcess(launch(tmp_path, FAMILY))
    family = family_of_three(process)
    process.send_to_all(signal.SIGSTOP)
    wait_until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in family))
    process.send_to_all(signal.SIGCONT)
    wait_until(lambda: all(p.status() == psutil.STATUS_SLEEPING for p in family))
    process.kill()


def test_a_program_that_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot run no-such-program"):
        SupervisedProcess(launch(tmp_path, ["no-such-program"]))


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    process = SupervisedProcess(launch(tmp_path, ["sh", "-c", "echo out; echo err >&2; exit 3"]))
    assert process.wait(10) == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


OWNER = """
import os, sys, time
from pathlib import Path
from epochsink_devkit.services.process import Launch, SupervisedProcess
folder = Path(sys.argv[1])
process = SupervisedProcess(Launch(command=sys.argv[3:], log=folder / "log", cwd=folder.parent,
                                   env=dict(os.environ), remove=folder))
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(1000)
print(process.pid, process._supervisor.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_a_killed_owner_takes_its_service_along(tmp_path: Path, how: str) -> None:
    """Also when a forked child of the owner has kept the life line open."""
    folder = tmp_path / "home"
    folder.mkdir()
    command = [sys.executable, "-c", OWNER, str(folder), how, *FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        service, supervisor = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
        wait_until(lambda: len(service.children()) == 2)
        below = service.children(recursive=True)
        forked = [p for p in psutil.Process(owner.pid).children() if p.pid != supervisor.pid]
        owner.kill()
        wait_until(lambda: not any(p.is_running() for p in (service, supervisor, *below)))
        for process in forked:
            process.kill()
    assert not folder.exists()
