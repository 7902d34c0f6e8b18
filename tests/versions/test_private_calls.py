"""Every call of PySpark's that is private or differs between versions does on this one what it is taken for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from versions.environments import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from versions.environments import Environment

TESTS = ROOT / "tests"


def test_the_tests_of_compat_pass(environment: Environment, tmp_path: Path) -> None:
    environment.pip("pytest>=8")
    helpers = os.pathsep.join(str(TESTS / folder) for folder in ("support", "versions"))
    asked: list[str | Path] = ["-m", "pytest", "-q", "-p", "plain_session", "--noconftest", "--rootdir", tmp_path]
    file = TESTS / "integration" / "test_spark_compat.py"
    done = environment.run("python", *asked, "-c", os.devnull, file, folder=tmp_path, PYTHONPATH=helpers)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
