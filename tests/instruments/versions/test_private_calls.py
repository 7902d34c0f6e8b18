"""What is private in PySpark, or differs between its versions, is on this one what it is taken for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from versions.environments import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from versions.environments import Environment

TESTS = ROOT / "tests"


@pytest.mark.parametrize("name", ["test_spark_compat.py", "test_spark_checkpoints.py"])
def test_the_tests_of_calls_and_of_checkpoints_pass(environment: Environment, tmp_path: Path, name: str) -> None:
    """A version writes checkpoints in formats of its own, in which the input of an epoch must be found."""
    environment.pip("pytest>=8")
    helpers = os.pathsep.join(str(TESTS / folder) for folder in ("support", "instruments/versions"))
    asked: list[str | Path] = ["-m", "pytest", "-q", "-p", "plain_session", "--noconftest", "--rootdir", tmp_path]
    file = TESTS / "integration" / name
    done = environment.run("python", *asked, "-c", os.devnull, file, folder=tmp_path, PYTHONPATH=helpers)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
