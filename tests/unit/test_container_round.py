"""CI's round on containers: what a machine lacks is said in one line and is no failure; a test that fails is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROUND: Final = Path(__file__).parents[2] / "docker" / "round"
PROGRAMS: Final = (
    "bash",
    "dirname",
    "mktemp",
    "rm",
    "tail",
    "grep",
    "sort",
    "comm",
    "xargs",
    "timeout",
    "cat",
    "sleep",
)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder that is all of the PATH: no engine, no apt-get, and root who asks."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name) or "")
    program(folder, "id", "echo 0")
    return folder


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def play(programs: Path) -> tuple[int, str]:
    environment = {"PATH": str(programs), "TMPDIR": str(programs), "EPOCHSINK_IMAGES": "images"}
    command = ["bash", str(ROUND), str(programs / "python"), "tests"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


def test_who_is_not_root_and_has_no_engine_runs_no_round(programs: Path) -> None:
    program(programs, "id", "echo 1000")
    assert play(programs) == (
        0,
        "containers: this round is not run: no engine answers, and only root could start one\n",
    )


def test_an_engine_that_cannot_be_installed_is_no_failure(programs: Path) -> None:
    program(programs, "apt-get", "echo 'E: no such package'; exit 100")
    status, said = play(programs)
    assert status == 0
    assert said.startswith("containers: this round is not run: apt-get cannot install podman")
    assert said.count("\n") == 1


def test_an_engine_that_cannot_run_a_container_is_no_failure(programs: Path) -> None:
    program(programs, "docker", "[ $1 != run ] || { echo 'Operation not permitted'; exit 126; }")
    status, said = play(programs)
    assert (status, said.count("\n")) == (0, 1)
    assert said.endswith("cannot run a container: Operation not permitted\n")


@pytest.mark.parametrize(
    ("words", "status"), [("1 failed, 3 passed in 2.0s", 1), ("4 passed in 2.0s", 0)], ids=["failed", "passed"]
)
def test_the_round_ends_as_its_tests_do(programs: Path, words: str, status: int) -> None:
    program(programs, "docker", "")
    program(programs, "python", f"echo '{words}'; exit {status}")
    ended, said = play(programs)
    assert ended == status
    assert words in said


def test_a_round_that_takes_too_long_is_no_failure(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "docker", "")
    program(programs, "python", "echo 'tests ...'; exec sleep 30")
    short = ROUND.read_text().replace("${EPOCHSINK_ROUND_SECONDS:-450}", "1").replace('"$0"', f'"{ROUND}"')
    monkeypatch.setattr(f"{__name__}.ROUND", program(programs, "round", short))
    assert play(programs) == (0, "containers: this round is not run: it was not done within 1 s: tests ...\n")


def test_the_script_may_be_run() -> None:
    assert os.access(ROUND, os.X_OK)
