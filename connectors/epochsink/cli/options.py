"""The arguments that verbs share, and what they open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Final

import typer

from epochsink.cli.checkpoint_folder import QueryCheckpoint, open_place
from epochsink.cli.sinks_option import Loaded, load_sinks
from epochsink.errors import Addresses, EpochsinkError
from epochsink.sink import Sink
from epochsink.spark.import_guard import no_queries

Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The query's checkpoint folder: a path or URI.")]
SpoolPlace = Annotated[str | None, typer.Option("--spool", help="Where the spool is, if not in the checkpoint.")]
SinksOption: Final = typer.Option(
    "--sinks", metavar="MODULE:ATTRIBUTE", help="The object that your pipeline starts, or a dict of sinks."
)
Sinks = Annotated[str, SinksOption]
AnySinks = Annotated[str | None, SinksOption]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@contextmanager
def opened(
    checkpoint: str, sinks: str | None, spool: str | None
) -> Iterator[tuple[QueryCheckpoint, Mapping[str, Sink]]]:
    """Yield the checkpoint, and the sinks that ``--sinks`` names; an error's commands name both."""
    with no_queries("imports the module for the sinks that --sinks names"):
        loaded = load_sinks(sinks) if sinks else Loaded({})
        with open_place(checkpoint, spool or loaded.spool, loaded.storage_options, loaded.checkpoint) as place:
            try:
                yield replace(place, reference=sinks or ""), loaded.sinks
            except EpochsinkError as failure:
                failure.address(Addresses(place.location, sinks or "", spool or loaded.spool or ""))
                raise


def typed_options(sinks: str | None, spool: str | None) -> list[str]:
    """Return the options that opened a checkpoint, as words: the commands of an answer repeat them."""
    return [*(["--sinks", sinks] if sinks else []), *(["--spool", spool] if spool else [])]
