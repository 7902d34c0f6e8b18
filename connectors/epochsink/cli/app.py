"""The `epochsink` command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version as installed
from pathlib import Path
from platform import python_version
from typing import Annotated

import typer
from rich.console import Console

from epochsink.cli import audit as comparison
from epochsink.cli import doctor as examination
from epochsink.cli import orphans as search
from epochsink.cli import status as state
from epochsink.cli.abandon import Abandonment
from epochsink.cli.accept import Acceptance, accepted_epoch
from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.console import ATTENTION, AsJson, answering
from epochsink.cli.devkit import AllVerbs
from epochsink.cli.letters import app as letters
from epochsink.cli.operation import Operation, Recovery
from epochsink.cli.options import AnySinks, Checkpoint, Sinks, SpoolPlace, Yes, opened, typed_options
from epochsink.cli.repair import Repair
from epochsink.cli.resolve import Resolution, Ruling
from epochsink.cli.sinks_option import load_sinks
from epochsink.errors import Addresses
from epochsink.sink import Sink
from epochsink.spark.import_guard import no_queries

app = typer.Typer(
    cls=AllVerbs,
    help="Exactly-once sinks for PySpark Structured Streaming.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(letters, name="letters")


def _show_version(wanted: bool) -> None:
    if wanted:
        # not by its distribution: it may be pyspark-client's, or a platform's own
        from pyspark import __version__ as pyspark  # noqa: PLC0415 - takes a while

        typer.echo(f"epochsink {installed('epochsink')} (PySpark {pyspark}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions, and end.")
    ] = False,
) -> None:
    """Take what goes before the verb."""


@app.command()
def status(
    checkpoint: Checkpoint,
    *,
    spool: SpoolPlace = None,
    sinks: AnySinks = None,
    epochs: Annotated[int, typer.Option(help="How many epochs to list, newest first.", min=0)] = 10,
    max_age: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End with status 3 if an epoch is late or under way for longer."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show whether data is late, what is recorded, decided and committed, and what to type: look here first.

    Reads only: safe beside a running query. With --sinks the targets are asked, too: whether their markers agree with
    the ledger, what is pending there, since when, and what it blocks. --sinks is needed for an object store whose
    settings are in ExactlyOnce(storage_options=...). Ends with status 3 if the query has stopped with a failure, or the
    next start will.
    """
    with answering(as_json=as_json) as answer:
        with opened(checkpoint, sinks, spool) as (place, given):
            current = state.read_status(place, given, typed_options(sinks, spool))
        answer.values.update(asdict(replace(current, targets=())))
        answer.values["targets"] = [target.to_json() for target in current.targets]
        if not as_json:
            state.show(current, epochs, Console())
    if current.damage:
        raise typer.Exit(1)
    if current.needs_person:
        raise typer.Exit(ATTENTION)
    if max_age is not None and max(current.late_seconds, current.open_seconds) > max_age:
        raise typer.Exit(ATTENTION)


@app.command()
def doctor(
    sinks: Annotated[
        str, typer.Argument(metavar="PIPELINE:SINK", help="The object that your pipeline starts, or a dict of sinks.")
    ],
    *,
    frame: Annotated[
        str | None,
        typer.Option(metavar="MODULE:ATTRIBUTE", help="The stream's DataFrame, or a function of the session for it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine all that a pipeline needs before it starts: a line for each thing, with what to do about it.

    Prepares an epoch without rows in each target and rolls it back; creates only what a start would create.
    """
    with answering(as_json=as_json) as answer:
        with no_queries("imports the module for the sinks that doctor examines"):
            lines = answer.values["lines"] = []
            for line in examination.examine(load_sinks(sinks), sinks, frame):
                lines.append(asdict(line))
                answer.say(str(line))
        status = examination.status_of([line["state"] for line in lines])
    if status:
        raise typer.Exit(status)


@app.command()
def audit(checkpoint: Checkpoint, *, sinks: Sinks, spool: SpoolPlace = None, as_json: AsJson = False) -> None:
    """Compare the receipts in the ledger with what the targets hold, and say what could not be compared.

    Reads only: safe beside a running query. Ends with status 3 if a target lacks rows or has too many, with 1 if one
    does not answer.
    """
    with answering(as_json=as_json) as answer:
        with opened(checkpoint, sinks, spool) as (place, given):
            audits = comparison.audit(place, given, Addresses(place.location, sinks, spool or ""))
        answer.values["sinks"] = [asdict(each) for each in audits]
        for each in audits:
            for line in each.lines():
                answer.say(line)
    if any(each.differs for each in audits):
        raise typer.Exit(ATTENTION)
    if any(each.error for each in audits):
        raise typer.Exit(1)


@app.command()
def recover(
    checkpoint: Checkpoint, *, sinks: Sinks, spool: SpoolPlace = None, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Commit what is decided and abort what is not recorded: if the query cannot start now, but its rows are needed.

    A recorded epoch is never aborted.
    """
    _do(Recovery, checkpoint, sinks, spool, yes=yes, as_json=as_json)


@app.command()
def repair(
    checkpoint: Checkpoint, *, sinks: Sinks, spool: SpoolPlace = None, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Apply retained epochs again to a target that was set back: if the query stops with WentBack and retain= was set.

    From the target's marker on, in order, each with its marker. May be repeated if it was interrupted.
    """
    _do(Repair, checkpoint, sinks, spool, yes=yes, as_json=as_json)


@app.command()
def abandon(
    checkpoint: Checkpoint,
    *,
    sinks: AnySinks = None,
    gone: Annotated[
        list[str] | None, typer.Option("--gone", metavar="NAME", help="A sink whose target no longer exists.")
    ] = None,
    spool: SpoolPlace = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Close a checkpoint that will not run again, and end all that it holds in the targets.

    What Spark has decided is committed first. Epochs that are recorded and not decided are shown, and aborted.
    """
    _do(
        lambda place, given: Abandonment(place, sinks=given, gone=gone or []),
        checkpoint,
        sinks,
        spool,
        yes=yes,
        as_json=as_json,
    )


@app.command()
def resolve(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(metavar="EPOCH", min=0, help="A recorded epoch that is not done.")],
    *,
    sink: Annotated[str, typer.Option("--sink", metavar="NAME", help="The sink whose share of it is closed.")],
    ruling: Annotated[Ruling, typer.Option("--as", help="What you know of the rows in the target.")],
    sinks: AnySinks = None,
    spool: SpoolPlace = None,
    keep_in: Annotated[Path, typer.Option(help="Folder for the rows that are discarded, as Parquet.")] = Path(),
    without_rows: Annotated[
        bool, typer.Option("--without-rows", help="Discard rows also if the spool does not hold them any more.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Close an epoch whose outcome the target cannot tell: if the query stops with OutcomeUnknown.

    committed: the rows are in the target. replay: they are not, and are written again from the spool (needs --sinks).
    discard: they are not, and shall not be; what the spool holds of them is kept as a Parquet file.
    """

    def resolution(place: QueryCheckpoint, given: Mapping[str, Sink]) -> Operation:
        return Resolution(
            place,
            epoch=epoch,
            sink=sink,
            ruling=ruling,
            sinks=given,
            folder=keep_in.absolute(),
            without_rows=without_rows,
        )

    _do(resolution, checkpoint, sinks, spool, yes=yes, as_json=as_json)


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
    sinks: AnySinks = None,
    spool: SpoolPlace = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Confirm that the targets are right up to EPOCH: if the query stops with WentBack, and you have made them right.

    With --sink: the target holds what it should up to EPOCH, although its marker is gone or older, or it is another
    server (it was restored or moved, and what was missing has been loaded). Without: the epochs up to EPOCH that Spark
    decided without ExactlyOnce were empty, or have been loaded by hand; with --sinks, the targets are asked first: if
    they know these epochs, the ledger is an older copy.
    """
    _do(lambda place, given: Acceptance(place, epoch, sink, given), checkpoint, sinks, spool, yes=yes, as_json=as_json)


@app.command()
def orphans(
    *,
    dsn: Annotated[str | None, typer.Option(help="A PostgreSQL database.")] = None,
    bootstrap_servers: Annotated[str | None, typer.Option(help="A Kafka cluster.")] = None,
    hosts: Annotated[str | None, typer.Option(help="An Elasticsearch cluster; several with commas.")] = None,
    opensearch: Annotated[str | None, typer.Option(help="An OpenSearch cluster; several with commas.")] = None,
    options: Annotated[Path | None, typer.Option(help="File with the client's options, NAME=VALUE lines.")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="NAME", help="End this one: its rows are gone.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Find what sinks have left in a server: if its checkpoint is lost, or not known."""
    with (
        answering(as_json=as_json) as answer,
        search.target_of(dsn, bootstrap_servers, hosts, opensearch, options) as target,
    ):
        if end is None:
            remnants = target.remnants()
            answer.values["remnants"] = [each.to_json() for each in remnants]
            if not as_json:
                search.show(remnants, Console())
            return
        remnant = search.one(target, end)
        lost = "if its checkpoint has recorded it, its rows are lost"
        answer.confirm([f"end {remnant.kind} {remnant.name}: {lost}"], yes=yes)
        target.end(remnant)
        answer.values["done"] = [f"ended {remnant.name}"]
        answer.say(f"ended {remnant.name}")


def main() -> None:
    """Run the command line; entry point of the distribution."""
    app()


def _do(
    planned: Callable[[QueryCheckpoint, Mapping[str, Sink]], Operation],
    checkpoint: str,
    sinks: str | None,
    spool: str | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Say what an operation will do, ask, and do it."""
    with answering(as_json=as_json) as answer, opened(checkpoint, sinks, spool) as (place, given), answer.log():
        operation = planned(place, given)
        answer.confirm(operation.plan(), yes=yes)
        with operation.noting_failure():
            operation.carry_out()


if __name__ == "__main__":
    main()
