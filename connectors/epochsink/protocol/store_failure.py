"""Explain a failure of the checkpoint's store, and say what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, TypeGuard

from epochsink.errors import EpochsinkError, OutcomeUnknown

_REMEDIES: Final = {
    errno.ENOSPC: "the disk is full: free space on it (df -h and df -i show how much there is)",
    errno.EDQUOT: "the quota of this user is used up: free space, or raise the quota",
    errno.EFBIG: "the limit on the size of files is reached: raise it (ulimit -f shows it)",
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n shows it)",
    errno.ENFILE: "this machine may open no more files: raise the limit (sysctl fs.file-max)",
    errno.EROFS: "the file system is mounted read-only: mount it writable (dmesg tells of a fault of the disk)",
    errno.EIO: "the disk or the mount fails: read dmesg",
}


def is_of_store(failure: BaseException) -> TypeGuard[OSError]:
    """Return whether an error is the operating system's or a store's own, which says nothing of epochs."""
    return isinstance(failure, OSError) and not isinstance(failure, EpochsinkError)


def remedy(failure: BaseException, otherwise: str) -> str:
    """Return what to do about a failure of a store, also one that Spark's JVM reports."""
    text = str(failure)
    for code, hint in _REMEDIES.items():
        if getattr(failure, "errno", None) == code or os.strerror(code) in text:
            return hint
    return otherwise


def unwritable(folder: Path) -> str:
    """Return what to do about a folder that may not be written: its rights may not be the reason."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return _REMEDIES[errno.EROFS]
    return "let this user write the folder, or give another"


def stopped_by(failure: OSError, doing: str) -> OutcomeUnknown:
    """Return the error for a store that failed in a step whose outcome only the next start can find out."""
    return OutcomeUnknown(
        f"the store of the checkpoint, or a sink, failed while {doing}: {failure}",
        hint=f"{remedy(failure, 'see that the store can be reached and written')}; then start the query again, which "
        "finds out what was done, and commits what is decided: no row is lost or duplicated",
    )
