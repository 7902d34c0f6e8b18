"""The `epochsink` command."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from epochsink.cli import orphans, status_table
from epochsink.cli import recover as operations
from epochsink.cli.abandon import Abandonment
from epochsink.cli.accept import Acceptance, accepted_epoch
from epochsink.cli.checkpoint_folder import open_place
from epochsink.cli.demo import demo
from epochsink.cli.error_output import errors_in_one_block
from epochsink.cli.resolve import Resolution, Ruling
from epochsink.cli.sinks_option import load_sinks
from epochsink.cli.status import read_status
from epochsink.errors import ConfigurationError
from epochsink.spark.import_guard import no_queries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.cli.recover import Account
    from epochsink.cli.sinks_option import Loaded

app = typer.Typer(
    help="Exactly-once sinks for PySpark Structured Streaming.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.command()(demo)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"epochsink {installed('epochsink')} (PySpark {installed('pyspark')}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions, and end.")
    ] = False,
) -> None:
    """Take what goes before the verb."""


Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The query's checkpoint folder: a path or URI.")]
SpoolPlace = Annotated[str | None, typer.Option("--spool", help="Where the spool is, if not in the checkpoint.")]
SinksOption = typer.Option("--sinks", metavar="MODULE:ATTRIBUTE", help="An ExactlyOnce object or a dict of sinks.")
Sinks = Annotated[str, SinksOption]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

FENCES: Final = "This takes the checkpoint's ledger: a driver that runs on it now stops with Fenced."

IMPORTS: Final = "imports the module for the sinks that --sinks names"


@app.command()
def status(
    checkpoint: Checkpoint,
    *,
    spool: SpoolPlace = None,
    sinks: Annotated[str | None, SinksOption] = None,
    epochs: Annotated[int, typer.Option(help="How many epochs to list, newest first.", min=0)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what is recorded, decided and committed, and what to type next: look here first.

    Reads only: safe beside a running query. --sinks is needed only for an object store whose settings are in
    ExactlyOnce(storage_options=...).
    """
    with errors_in_one_block(), no_queries(IMPORTS):
        loaded = load_sinks(sinks) if sinks is not None else None
        with _place_of(checkpoint, loaded, spool) as place:
            found = read_status(place)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        status_table.show(found, epochs, Console())
    if found.damage:
        raise typer.Exit(1)


@app.command()
def recover(checkpoint: Checkpoint, *, sinks: Sinks, spool: SpoolPlace = None, yes: Yes = False) -> None:
    """Commit what is decided and abort what is not recorded: if the query cannot start now, but its rows are needed.

    A recorded epoch is never aborted.
    """
    with errors_in_one_block(), _log_on_console(), no_queries(IMPORTS):
        loaded = load_sinks(sinks)
        with _place_of(checkpoint, loaded, spool) as place:
            typer.echo(FENCES)
            _confirm(yes=yes)
            _say(operations.recover(place, loaded.sinks))


@app.command()
def abandon(
    checkpoint: Checkpoint,
    *,
    sinks: Annotated[str | None, SinksOption] = None,
    gone: Annotated[
        list[str] | None, typer.Option("--gone", metavar="NAME", help="A sink whose target no longer exists.")
    ] = None,
    spool: SpoolPlace = None,
    yes: Yes = False,
) -> None:
    """Close a checkpoint that will not run again, and end all that it holds in the targets.

    What Spark has decided is committed first. Epochs that are recorded and not decided are shown, and aborted.
    """
    with errors_in_one_block(), _log_on_console(), no_queries(IMPORTS):
        loaded = load_sinks(sinks) if sinks is not None else None
        with _place_of(checkpoint, loaded, spool) as place:
            abandonment = Abandonment(place, sinks=loaded.sinks if loaded else {}, gone=gone or [])
            _plan(abandonment.plan())
            _confirm(yes=yes)
            abandonment.carry_out()


@app.command()
def resolve(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(metavar="EPOCH", min=0, help="A recorded epoch that is not done.")],
    *,
    sink: Annotated[str, typer.Option("--sink", metavar="NAME", help="The sink whose share of it is closed.")],
    ruling: Annotated[Ruling, typer.Option("--as", help="What you know of the rows in the target.")],
    sinks: Annotated[str | None, SinksOption] = None,
    spool: SpoolPlace = None,
    keep_in: Annotated[Path, typer.Option(help="Folder for the rows that are discarded, as Parquet.")] = Path(),
    yes: Yes = False,
) -> None:
    """Close an epoch whose outcome the target cannot tell: if the query stops with OutcomeUnknown.

    committed: the rows are in the target. replay: they are not, and are written again from the spool (needs --sinks).
    discard: they are not, and shall not be; what the spool holds of them is kept as a Parquet file.
    """
    with errors_in_one_block(), _log_on_console(), no_queries(IMPORTS):
        loaded = load_sinks(sinks) if sinks is not None else None
        with _place_of(checkpoint, loaded, spool) as place:
            resolution = Resolution(
                place,
                epoch=epoch,
                sink=sink,
                ruling=ruling,
                sinks=loaded.sinks if loaded else None,
                folder=keep_in.absolute(),
            )
            _plan(resolution.plan())
            _confirm(yes=yes)
            resolution.carry_out()
            if loaded is not None:
                _say(operations.recover(place, loaded.sinks))


@app.command()
def accept(
    checkpoint: Checkpoint,
    epoch: Annotated[
        int,
        typer.Argument(metavar="EPOCH", parser=accepted_epoch, help="The newest epoch in question, or 'none'."),
    ],
    *,
    sink: Annotated[
        str | None, typer.Option("--sink", metavar="NAME", help="The sink whose target it is about.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Confirm that the targets are right up to EPOCH: if the query stops with WentBack, and you have made them right.

    With --sink: the target holds what it should up to EPOCH, although its marker is gone or older, or it is another
    server (it was restored or moved, and what was missing has been loaded). Without: the epochs up to EPOCH that Spark
    decided without ExactlyOnce were empty, or have been loaded by hand.
    """
    with errors_in_one_block(), _log_on_console(), _place_of(checkpoint, None, None) as place:
        acceptance = Acceptance(place, epoch, sink)
        _plan(acceptance.plan())
        _confirm(yes=yes)
        acceptance.carry_out()


@app.command("orphans")
def find_orphans(
    *,
    dsn: Annotated[str | None, typer.Option(help="A PostgreSQL database.")] = None,
    bootstrap_servers: Annotated[str | None, typer.Option(help="A Kafka cluster.")] = None,
    hosts: Annotated[str | None, typer.Option(help="An Elasticsearch cluster; several with commas.")] = None,
    options: Annotated[Path | None, typer.Option(help="File with the client's options, NAME=VALUE lines.")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="NAME", help="End this one: its rows are gone.")] = None,
    yes: Yes = False,
) -> None:
    """Find what sinks have left in a server: if its checkpoint is lost, or not known."""
    with errors_in_one_block(), orphans.Search(dsn, bootstrap_servers, hosts, options) as search:
        if end is None:
            orphans.show(search.find(), Console())
            return
        remnant = search.one(end)
        _plan([f"end {remnant.kind} {remnant.name}: its rows are lost if its checkpoint still counts on it"])
        _confirm(yes=yes)
        search.end(remnant)
        typer.echo(f"ended {remnant.name}")


def main() -> None:
    """Run the command line; entry point of the distribution."""
    app()


def _mount_services() -> None:
    """Add the verbs for services, or one that says what they need."""
    try:
        from epochsink.cli.services import app as services  # noqa: PLC0415 - clients of the extra [services]
    except ModuleNotFoundError as absent:
        missing = absent.name

        @app.command("services")
        def refuse() -> None:
            """Start services for development: needs the extra 'services'."""
            with errors_in_one_block():
                raise ConfigurationError(
                    f"the services need the module {missing}", hint='pip install "epochsink[services]"'
                )
    else:
        app.add_typer(services, name="services")


_mount_services()


@contextmanager
def _place_of(checkpoint: str, loaded: Loaded | None, spool: str | None) -> Iterator[Place]:
    given = loaded.spool if loaded is not None and spool is None else spool
    options = loaded.storage_options if loaded is not None else {}
    with open_place(checkpoint, given, options) as place:
        if loaded is not None and loaded.checkpoint is not None:
            with open_place(loaded.checkpoint, None, options) as own:
                if own.location != place.location:
                    raise ConfigurationError(
                        f"the sinks belong to checkpoint {own.location}, and this is {place.location}",
                        hint="give the query's own checkpoint; if it was moved, let --sinks name a dict of sinks",
                    )
        yield place


def _say(account: Account) -> None:
    for number in account.committed:
        typer.echo(f"committed epoch {number}")
    for number in account.pending:
        typer.echo(f"left epoch {number} as it is recorded")
    if not account.committed and not account.pending:
        typer.echo("no recorded epoch is pending")


def _plan(lines: list[str]) -> None:
    typer.echo("\n".join(("This will", *(f"  - {line}" for line in lines))))


def _confirm(*, yes: bool) -> None:
    if not yes and not typer.confirm("Go on?"):
        typer.echo("nothing was changed")
        raise typer.Exit(1)


class _Echo(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage())


@contextmanager
def _log_on_console() -> Iterator[None]:
    """Print what the package logs: it says what was done to ledger and targets."""
    log = logging.getLogger("epochsink")
    handler = _Echo()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


if __name__ == "__main__":
    main()
