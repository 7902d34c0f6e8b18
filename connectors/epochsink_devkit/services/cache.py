"""Keep fetched artifacts in a folder shared by processes and test runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "EPOCHSINK_CACHE"


def cache_folder() -> Path:
    """Return the user's cache folder, or the one in the environment variable EPOCHSINK_CACHE. Creates it if missing."""
    folder = Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("epochsink"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def world_readable_cache_folder() -> Path:
    """Return the machine's cache folder, for root, because other accounts cannot enter root's own."""
    folder = Path(platformdirs.site_cache_dir("epochsink"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes. The file at `path` is not removed."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, after `build(folder)` has made it if it does not exist.

    Only one process builds at a time. A failed or interrupted build leaves no `target`.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # One lock for all targets, because two processes must not use Ivy's own cache at once.
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
