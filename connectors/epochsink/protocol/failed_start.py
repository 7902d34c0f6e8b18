"""Why a start failed that did not take the ledger, for people: a file beside the ledger, which only its owner writes.

Nothing is decided by it. Another query may run on the checkpoint meanwhile, and is not what failed.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Final

from epochsink.errors import Fenced, LedgerCorrupt
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Stamp, Stopped, decode, encode
from epochsink.protocol.storage import Storage

FOLDER: Final = "epochsink/failed-starts"


def note(files: Storage, failure: Exception, application: str) -> None:
    """Keep a start's failure, in words without values of rows, in place of earlier ones.

    Not if the ledger has it, nor of a start that another driver has overtaken, nor in a folder in which no query has
    ever run. Raises OSError.
    """
    entry = replace(Stopped.of(failure), stamp=Stamp.now(application))
    if isinstance(failure, Fenced) or Checkpoint(files).query_id() is None or _is_in_ledger(files, entry):
        return
    earlier = _names(files)
    files.create(f"{FOLDER}/{time.time_ns() // 1_000_000}-{uuid.uuid4().hex}", encode(entry))
    files.remove_many(earlier)


def _is_in_ledger(files: Storage, entry: Stopped) -> bool:
    try:
        known = Ledger(files, uuid.uuid4().hex).read().stopped
    except LedgerCorrupt:
        return False
    if known is None or known.stamp is None or entry.stamp is None:
        return False
    same = (known.stamp.host, known.stamp.pid) == (entry.stamp.host, entry.stamp.pid)
    return same and known.failure == entry.failure


def newest(files: Storage) -> Stopped | None:
    """Return the newest failure since a query started here last; None if there is none. Raises OSError."""
    for name in reversed(_names(files)):
        # a start removes it meanwhile; what another version wrote is not needed
        with suppress(ValueError, KeyError, TypeError):
            entry = decode(files.read(name) or b"")
            if isinstance(entry, Stopped):
                return entry
    return None


def forget(files: Storage) -> None:
    """Forget the failures: a start has succeeded. Raises OSError."""
    files.remove_many(_names(files))


def _names(files: Storage) -> list[str]:
    """Return the files, oldest first."""
    return sorted(f"{FOLDER}/{name}" for name in files.names(FOLDER) if name[0].isdigit())
