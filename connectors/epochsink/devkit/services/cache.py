"""Where fetched artifacts are kept, shared by processes and by test runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CACHE_VARIABLE = "EPOCHSINK_CACHE"


def cache_folder() -> Path:
    """Return the user's cache folder, or the one that the environment variable EPOCHSINK_CACHE names; it exists."""
    folder = Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("epochsink"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def world_readable_cache_folder() -> Path:
    """Return the machine's cache folder: for root, whose own one another account cannot enter."""
    folder = Path(platformdirs.site_cache_dir("epochsink"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file at `path` stays behind."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, made by `build(folder)` if it does not exist yet.

    Of several processes one builds; a failed or interrupted build leaves no `target`.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # One lock for all targets: Ivy's own cache is not made for two processes at once.
    with locked(target.parent / ".lock"):
        if target.is_dir():
            return target
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            draft.chmod(0o755)
            build(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return target
