"""Which database a sink's epochs are in: cluster, database and timeline, compared with what was recorded.

A copy of the data includes the markers, so they cannot tell a copy from the original. The system identifier can: initdb
makes it, and it stays through crashes, physical backups and failovers. A new timeline begins whenever a standby is
promoted or a backup is recovered; its number is larger than that of the timeline before. So a larger timeline means a
failover, and the markers show whether that lost commits. A smaller timeline means that this server is the old primary.

A standby has no timeline of its own, and may not have replayed yet what it has received. So its markers prove nothing,
and a standby is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from epochsink.errors import WentBack
from epochsink.sink.values import fields_of


@dataclass(frozen=True, slots=True)
class Place:
    """One database of one cluster. ``cluster`` is None, and ``timeline`` 0, if the server does not tell."""

    database: str
    oid: int
    cluster: str | None = None
    timeline: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Self | None:
        """Return what was recorded; None if nothing was."""
        return None if values is None else cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return fields_of(self)

    def require(self, recorded: Place | None, table: object, done: int, pending: int | None = None) -> None:
        """Raise `WentBack` unless this is where ``recorded``, of the newest epoch, was.

        That is the newest ``done`` epoch (-1: none), or the one that is ``pending`` after it.
        """
        if recorded is None:
            return
        epoch = done if pending is None else pending
        # a server that does not tell its cluster, now or then, is compared by the database alone
        if (self.cluster or recorded.cluster) != (recorded.cluster or self.cluster) or self.oid != recorded.oid:
            holds = f"every row of this query up to epoch {epoch}" if epoch >= 0 else "no row of this query"
            raise WentBack(
                f"table {table} is in {self}, and the ledger says that this query writes to {recorded}: dsn= names "
                "another server, or the database was restored from a dump or upgraded by pg_upgrade",
                hint=f"name the right server in dsn=; or if this one replaces it, and holds {holds}, accept it: "
                f"epochsink accept CHECKPOINT {epoch if epoch >= 0 else 'none'} --sink NAME",
            )
        if 0 < self.timeline < recorded.timeline:
            raise WentBack(
                f"table {table} is on timeline {self.timeline} of its cluster, and epoch {epoch} was prepared on "
                f"timeline {recorded.timeline}: this server is the old primary; a standby was promoted",
                hint="name the present primary in dsn= (several hosts with target_session_attrs=read-write); "
                "stop this server. If that primary is lost for good, and this server holds every row up to the newest "
                f"done epoch: epochsink accept CHECKPOINT {done if done >= 0 else 'none'} --sink NAME",
            )

    def __str__(self) -> str:
        where = f" of cluster {self.cluster}" if self.cluster else ""
        return f"database '{self.database}' (oid {self.oid}){where}"
