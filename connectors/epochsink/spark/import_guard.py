"""Refuse to start queries in a process that imports a user's module only for its sinks, as the command line does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

# of the whole process: Spark calls foreachBatch in a thread of its own, where a context variable would not be seen
_forbidden: list[str] = []


@contextmanager
def no_queries(reason: str) -> Iterator[None]:
    """Refuse to start or to serve a query in this process; ``reason`` completes "this process ..."."""
    _forbidden.append(reason)
    try:
        yield
    finally:
        _forbidden.remove(reason)


def refuse_query() -> None:
    """Raise `ConfigurationError` inside of `no_queries`."""
    if _forbidden:
        raise ConfigurationError(
            f"a streaming query is started where none may run: this process {_forbidden[-1]}; no row has moved",
            hint='start the query below `if __name__ == "__main__":` or in a function, so that importing the module '
            "does not run the pipeline",
        )
