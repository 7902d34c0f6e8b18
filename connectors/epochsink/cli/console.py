"""How a verb talks to a terminal: what it will do, one question, what it has done, and errors without a traceback."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console

from epochsink.errors import EpochsinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLIENTS: Final = {
    "psycopg": "PostgreSQL",
    "cimpl": "Kafka",
    "kafka": "Kafka",
    "elastic_transport": "Elasticsearch",
    "elasticsearch": "Elasticsearch",
    "obstore": "the object store",
    "py4j": "Spark",
    "pyspark": "Spark",
}
"""Which system the client speaks to that an exception comes from: by the package's name, as few are installed."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print an error of this package, a client or the operating system as text, and end with status 1."""
    try:
        yield
    except Exception as failure:
        text = _plain(failure)
        if text is None:
            raise
        # plain text: a message's brackets are no markup, and a terminal's width breaks no line
        console = Console(stderr=True)
        console.print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from failure


def confirm(plan: Sequence[str], *, yes: bool) -> None:
    """Print what will be done and, unless ``yes``, ask; a no, or no answer, ends with status 1."""
    typer.echo("\n".join(("This will", *(f"  - {line}" for line in plan))))
    try:
        agreed = yes or typer.confirm("Go on?")
    except typer.Abort:
        agreed = False
    if not agreed:
        typer.echo("nothing was changed")
        raise typer.Exit(1)


@contextmanager
def log_on_console() -> Iterator[None]:
    """Print what the package logs: it says what was done to ledger and targets."""
    log, level = logging.getLogger("epochsink"), logging.getLogger("epochsink").level
    handler = logging.StreamHandler(sys.stdout)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _plain(failure: Exception) -> str | None:
    """Return what to tell of a failure; None for a defect, whose traceback is needed."""
    if isinstance(failure, EpochsinkError):
        return str(failure)
    client = _CLIENTS.get(type(failure).__module__.partition(".")[0])
    if client is None and not isinstance(failure, OSError):
        return None
    check = "check that the file or the server exists, and that this user may use it"
    if client is not None:
        check = f"check that {client} runs, that this machine reaches it, and the address and credentials that it gets"
    doing = "".join(f"{note}: " for note in getattr(failure, "__notes__", ()))
    reason = " ".join(str(failure).split())
    return f"{doing}{client or 'the operating system'} says {type(failure).__name__}: {reason}\n  Hint: {check}"
