"""Look at targets without changing them: what a start would make is said, and not made.

A check runs in two ways. At a start it makes what the configuration allows: markers, a table, a topic, an index, a
schema. For `ExactlyOnce.check` and `epochsink doctor` it only compares. What makes something asks `would` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("epochsink_comparing", default=None)


@contextmanager
def comparing() -> Iterator[list[str]]:
    """Let the checks of the body, in this thread, make nothing; yield the list of what a start would make."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def only_compares() -> bool:
    """Return whether nothing may be made in a target."""
    return _notes.get() is not None


def would(make: str) -> bool:
    """Return whether nothing may be made. Then ``make``, such as "create topic 'x'", is noted for the user."""
    notes = _notes.get()
    if notes is None:
        return False
    if make not in notes:
        notes.append(make)
    return True
