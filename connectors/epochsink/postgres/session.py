"""A session that a driver keeps from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psycopg

from epochsink.postgres.database import Database


class Session:
    """A session that is opened on first use, and opened again after it was lost, or if it leads to a standby.

    ``connect`` opens one; its arguments are a name and for how many seconds to retry.
    """

    def __init__(self, connect: Callable[[str, float], Database], name: str) -> None:
        self._connect = connect
        self._name = name
        self._database: Database | None = None

    def database(self, retry_seconds: float = 0.0) -> Database:
        """Return a live session outside any transaction. Raises `psycopg.OperationalError`."""
        if self._database is not None and not self._database.is_of_primary():
            self.close()
        if self._database is None:
            self._database = self.another(retry_seconds)
        return self._database

    def another(self, retry_seconds: float = 0.0) -> Database:
        """Open one more of the same name. Raises as `database` does."""
        return self._connect(self._name, retry_seconds)

    def close(self) -> None:
        """Release the session. It may be used again."""
        if self._database is not None:
            with suppress(psycopg.Error):
                self._database.close()
            self._database = None
