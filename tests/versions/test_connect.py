"""Queries on a server of Spark Connect: what differs between the versions of PySpark, and what every query does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from versions.environments import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from versions.environments import Environment

SUPPORT: Final = ROOT / "tests" / "support"
CASES: Final = ("restarts", "adopts", "fails_idle", "refuses")


def test_queries_of_spark_connect(with_postgres_only: Environment, tmp_path: Path) -> None:
    """Three runs on a checkpoint, an adopted epoch, a commit that fails while the query is idle, and refusals."""
    with_postgres_only.install("connect,postgres")
    asked: list[str | Path] = [SUPPORT / "connect_cases.py", tmp_path, *CASES]
    done = with_postgres_only.run("python", *asked, folder=tmp_path, PYTHONPATH=str(SUPPORT))
    assert done.returncode == 0, done.stderr[-6000:]
    came = {name: result for name, result, _ in map(json.loads, done.stdout.splitlines())}
    assert came["restarts"] == {"seen": [1, 2, 3, 4], "rows": [1, 2, 3, 4, 5], "done": [0, 1, 2, 3], "active": False}
    assert (came["adopts"]["before"], came["adopts"]["rows"]) == ([1], [1, 2])
    assert "OutcomeUnknown" in came["fails_idle"]["failed"], came["fails_idle"]
    assert came["fails_idle"]["ended"]
    assert came["refuses"]["complete"].startswith("ConfigurationError: sink 'folder' appends rows"), came["refuses"]
