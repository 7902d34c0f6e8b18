"""How the command line tells of errors: one block of text, without a traceback, and status 1."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from epochsink.errors import EpochsinkError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def errors_in_one_block() -> Iterator[None]:
    """Print an error of this package or of the operating system, and end with status 1."""
    try:
        yield
    except (EpochsinkError, OSError) as failure:
        # plain text: a message's brackets are no markup, and a terminal's width breaks no line
        console = Console(stderr=True)
        console.print(f"error: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from failure
