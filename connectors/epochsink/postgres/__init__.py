"""PostgreSQL as a destination."""

from epochsink.postgres.sink import Postgres

__all__ = ["Postgres"]
