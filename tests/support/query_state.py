"""A query whose progress a test sets, for what reads the progress of queries."""

from __future__ import annotations

from typing import Any

from epochsink.protocol.progress import QueryProgress


class QueryState:
    """An `ExactlyOnce` object, as far as its metrics ask it."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def progress(self) -> QueryProgress:
        return QueryProgress(**self.state)
