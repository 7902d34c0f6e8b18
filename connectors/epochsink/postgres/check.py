"""Is everything there that the first epoch will need? Asked before any row moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from epochsink.postgres.config import Postgres
    from epochsink.postgres.sessions import Session


from epochsink.postgres import marker
from epochsink.postgres.catalog import read_target


def check(sink: Postgres, session: Session, schema: pa.Schema) -> tuple[list[str], str | None]:
    connection = session.connection()
    marker.create(connection, sink.marker_schema)
    target = read_target(connection, sink.relation)
    assert target
    return [], sink.mode(target.max_prepared_transactions)
