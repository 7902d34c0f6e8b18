"""The record of one run: what ran, on what, and what it found. A file of JSON each, kept with the project."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

import epochsink
from epochsink_devkit.services.versions import KAFKA, POSTGRES, elasticsearch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).parents[3]
RECORDS: Final = ROOT / "docs" / "explanation" / "proof"
_CLIENTS: Final = ("pyspark", "confluent-kafka", "psycopg", "elasticsearch")


class Record:
    """The record of a run that begins now: the code may be another one when it ends.

    ``what`` is a key of `proof.page.KINDS`, and ``seed`` repeats the run.
    """

    def __init__(self, what: str, seed: int | str) -> None:
        self._what = what
        self._seed = seed
        self._began = datetime.now(UTC)
        self._commit = commit()

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return (datetime.now(UTC) - self._began).total_seconds()

    def keep(self, folder: Path, figures: Mapping[str, Any]) -> Path:
        """Write what the run has found; return the file."""
        record = {
            "what": self._what,
            "began": self._began.isoformat(timespec="seconds"),
            "seconds": round(self.seconds),
            "seed": self._seed,
            "commit": self._commit,
            "machine": f"{psutil.cpu_count()} cores, {_gib():.0f} GiB, {platform.machine()}",
            # of the last 15 minutes, other programs' work included
            "load": round(os.getloadavg()[2], 1),
            "versions": versions(),
            "figures": dict(figures),
        }
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._began:%Y-%m-%d-%H%M%S} {self._what} {self._seed}"
        file = folder / f"{name.replace(' ', '-').replace('/', 'of')}.json"
        file.write_text(json.dumps(record, indent=1) + "\n")
        return file


def _gib() -> float:
    return float(psutil.virtual_memory().total / 2**30)


def kept(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder, oldest first."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def versions() -> dict[str, str]:
    """Return the versions of what runs: of Python, the clients and the servers."""
    servers = {"Kafka": KAFKA, "PostgreSQL": POSTGRES, "Elasticsearch": elasticsearch().version}
    ours = {"epochsink": epochsink.__version__, "Python": platform.python_version()}
    return ours | {name: metadata.version(name) for name in _CLIENTS} | servers


def commit() -> str:
    """Return the commit that runs, with ", changed" if code or tests differ from it; "unknown" without a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "connectors", "tests")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, changed" if changed else head


def _git(*words: str) -> str:
    command: Sequence[str] = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
