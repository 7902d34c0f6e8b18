"""One sink's table: its configuration and its identity."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from epochsink.postgres.committable import Merge, Relation
from epochsink.postgres.config import PostgresConfig
from epochsink.sink import Identity, identity_key


@dataclass(frozen=True, slots=True)
class SinkTable:
    """The table that a sink writes to. ``schema`` is the one that it was found in, if its own name has none."""

    config: PostgresConfig
    identity: Identity
    schema: str | None = None

    @property
    def relation(self) -> Relation:
        """The target table, in ``schema`` if its own name has none."""
        named = Relation.of(self.config.table)
        return Relation(named.schema or self.schema, named.name)

    @property
    def key(self) -> str:
        """The sink in names."""
        return identity_key(self.identity)

    def as_recorded(self, merge: Merge) -> Self:
        """Return it with table, key and way to merge as an epoch was written, whatever a later start sets."""
        given = {item.name: getattr(self.config, item.name) for item in fields(PostgresConfig)}
        schema, name = merge.target
        recorded = {
            "table": (name,) if schema is None else (schema, name),
            "key": merge.key,
            "order_by": self.config.order_by if merge.key else (),
            "delete_when": (self.config.delete_when or "true") if merge.deletes else None,
            "newer_wins": merge.newer_wins,
            "skip_unchanged": merge.skip_unchanged,
            "accumulate": merge.accumulate,
            "on_rejected": "dead_letter" if merge.sets_aside else "stop",
            # what a later start sets for its own epochs
            "letters_limit": 1.0,
            **({"atomic": True, "spool": True} if merge.sets_aside else {}),
        }
        return replace(self, config=PostgresConfig(**given | recorded))

    def __str__(self) -> str:
        return str(self.relation)
