"""PostgreSQL as a destination."""

from epochsink.postgres.config import Postgres

__all__ = ["Postgres"]
