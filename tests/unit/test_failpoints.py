"""failpoints kill the process where the environment says, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from epochsink import failpoints
from epochsink.failpoints import POINTS, reach

POINT = "coordinator.record.after"
PROGRAM = f"""
from epochsink.failpoints import reach
for i in range(3):
    reach("task.begin")
    reach({POINT!r})
    print(i, flush=True)
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_unarmed_points_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPOCHSINK_FAILPOINT", raising=False)
    for point in POINTS:
        reach(point)


def test_other_points_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHSINK_FAILPOINT", "task.begin:1000")
    for point in POINTS:
        reach(point)


def test_an_unknown_point_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHSINK_FAILPOINT", "task.begin:1000")
    with pytest.raises(KeyError, match="nowhere"):
        reach("nowhere")


@pytest.mark.parametrize(("armed", "printed"), [(POINT, ""), (f"{POINT}:1", ""), (f"{POINT}:3", "0\n1\n")])
def test_the_process_dies_at_its_point(armed: str, printed: str) -> None:
    done = run(EPOCHSINK_FAILPOINT=armed)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == printed


def test_it_dies_once(tmp_path: Path) -> None:
    once = tmp_path / "once"
    assert run(EPOCHSINK_FAILPOINT=POINT, EPOCHSINK_FAILPOINT_ONCE=str(once)).returncode == -signal.SIGKILL
    assert once.exists()
    assert run(EPOCHSINK_FAILPOINT=POINT, EPOCHSINK_FAILPOINT_ONCE=str(once)).stdout == "0\n1\n2\n"


def test_it_stops_there_until_it_is_let_go() -> None:
    environment = {"EPOCHSINK_FAILPOINT": f"{POINT}:2", "EPOCHSINK_FAILPOINT_SIGNAL": "STOP"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        finally:
            process.kill()


def test_every_point_is_reached_somewhere() -> None:
    """A point that no code reaches would make a crash test that cannot fail."""
    package = Path(failpoints.__file__).parent
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "faults.py")
    assert [point for point in POINTS if f'reach("{point}")' not in code] == []
