"""The checkpoint's file system takes no more: full, read-only, or a limit on files. Real ones, below real streams.

Mounts need namespaces, which some machines do not give to users. There only the limit on files is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import store_without_room

# one process for all cases
pytestmark = pytest.mark.thorough

APART: Final = ["unshare", "-rm"]
"""A program so started may mount, which nobody else sees."""


def _may_mount() -> bool:
    tried = [*APART, "mount", "-t", "tmpfs", "-o", "size=1m", "small", "/mnt"]
    try:
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


MAY_MOUNT: Final = _may_mount()
FULL: Final = ("No space left on device", "the disk is full: free space on it (df -h and df -i show how much there is)")
READ_ONLY: Final = ("Read-only file system", "the file system is mounted read-only: mount it writable")
LIMIT: Final = ("File too large", "the limit on the size of files is reached: raise it (ulimit -f shows it)")
ON_MOUNTS: Final = {
    "full-start": FULL,
    "full-write": FULL,
    "full-vote": FULL,
    "full-commit": FULL,
    # its rights are all right
    "readonly-start": ("may not be written by user id", READ_ONLY[1]),
    "readonly-vote": READ_ONLY,
    "readonly-commit": READ_ONLY,
}
CASES: Final = {"limit-write": LIMIT, **(ON_MOUNTS if MAY_MOUNT else {})}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what each stream made of it: one process for all."""
    folder = tmp_path_factory.mktemp("without-room")
    program = [*(APART if MAY_MOUNT else []), sys.executable, store_without_room.__file__, str(folder), *CASES]
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(Path(store_without_room.__file__).parent), *sys.path]),
    }
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_store_without_room_is_named_with_the_epoch_and_what_to_do(
    played: dict[str, dict[str, Any]], case: str
) -> None:
    """Once there is room, the next start ends what was begun, and no row is lost or duplicated."""
    cause, remedy = CASES[case]
    when = case.partition("-")[2]
    failed = played[case]
    assert cause in failed["message"]
    assert failed["hint"].startswith(remedy)
    assert when == "start" or "epoch 1" in failed["text"] or "pending: 1" in failed["text"]
    # what is decided may be visible before the ledger knows it
    assert failed["visible"] == (3 if when != "commit" else 6)
    assert failed["is_exact"]
    assert failed["done"] == [0, 1]
