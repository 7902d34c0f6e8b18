"""When the readers of a run look at a target, and when what they see is worth something."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from epochsink_devkit.history.readers.reader import TargetUnreachable, nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from epochsink_devkit.history.readers import TargetReader

GRACE_SECONDS: Final = 8.0
"""How long after its healing a server may still show what it held before."""
READ_EVERY_SECONDS: Final = 0.7
READ_SHARE: Final = 0.2
"""A read takes the whole of a target, which grows: a reader rests for most of the time."""
LONGEST_REST_SECONDS: Final = 10.0


class Blindfold:
    """Says whose readers may be shown an old state: while a server is cut off, and some seconds longer."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def cover(self, services: set[str]) -> None:
        """From now on, until `uncover`."""
        self._until |= dict.fromkeys(services, float("inf"))

    def uncover(self, services: set[str]) -> None:
        """From soon on they see again."""
        self._until |= dict.fromkeys(services, time.monotonic() + GRACE_SECONDS)

    def covers(self, service: str) -> bool:
        """Return whether a read is worth nothing now."""
        return self._until.get(service, 0.0) > time.monotonic()


class Guarded:
    """A reader whose reads are dropped while a server may lawfully answer from an old state."""

    def __init__(self, reader: TargetReader, service: str, blindfold: Blindfold) -> None:
        self._reader = reader
        self._service = service
        self._blindfold = blindfold

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        """Return the rows. Raises `TargetUnreachable`."""
        if self._blindfold.covers(self._service):
            raise TargetUnreachable("not to be believed now")
        rows = self._reader.read(fixed)
        if self._blindfold.covers(self._service):
            raise TargetUnreachable("not to be believed now")
        return rows

    def leftovers(self) -> list[tuple[str, str]]:
        """Return what is left over."""
        return self._reader.leftovers()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


class Rest:
    """Lets a reader rest between two reads, until a driver is found dead: its successor recovers within seconds."""

    def __init__(self, deaths: Callable[[], int]) -> None:
        self._deaths = deaths
        self._seen = deaths()

    def __call__(self, took: float) -> None:
        """Rest after a read that took so many seconds, but not if a driver has died since that read began."""
        seconds = min(LONGEST_REST_SECONDS, max(READ_EVERY_SECONDS, took / READ_SHARE - took))
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._deaths() == self._seen:
            time.sleep(0.05)
        self._seen = self._deaths()
