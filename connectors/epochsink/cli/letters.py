"""`epochsink letters`: list, retry and drop the dead letters of a query's sinks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Final

import typer

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.console import ATTENTION, AsJson, VerbOutput, answering
from epochsink.cli.options import Checkpoint, Sinks, Yes, opened
from epochsink.errors import ConfigurationError, naming
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Chosen, Letter, Letters, Retried, Sink, participants_of

app = typer.Typer(
    help="Rows that a target refused and that were set aside: list them, write them again, or delete them.",
    no_args_is_help=True,
)

SinkName = Annotated[str | None, typer.Option("--sink", metavar="NAME", help="Only letters of this sink.")]
OneSinkName = Annotated[
    str | None, typer.Option("--sink", metavar="NAME", help="The sink; needed if several have such letters.")
]
Ids = Annotated[list[str] | None, typer.Option("--id", metavar="ID", help="A letter; may be given several times.")]
OfEpoch = Annotated[int | None, typer.Option("--epoch", help="Only letters of this epoch.", min=0)]
Every = Annotated[bool, typer.Option("--all", help="All letters.")]

_SHOWN: Final = 300


@app.command("list")
def show(
    checkpoint: Checkpoint,
    *,
    sinks: Sinks,
    sink: SinkName = None,
    ids: Ids = None,
    epoch: OfEpoch = None,
    limit: Annotated[int, typer.Option(help="How many letters of each sink to list, newest first.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first: id, epoch, what the target said, and the row.

    Reads only: safe beside a running query. --json has the whole rows.
    """
    chosen = Chosen(tuple(ids or ()), epoch)
    with (
        answering(as_json=as_json) as answer,
        opened(checkpoint, sinks, None) as (place, given),
        _letters(place, given, sink) as letters_of,
    ):
        answer.values["sinks"] = []
        for name, letters in letters_of.items():
            _tell(answer, name, letters.count(chosen), letters.read(chosen, limit))


@app.command()
def retry(
    checkpoint: Checkpoint,
    *,
    sinks: Sinks,
    sink: SinkName = None,
    ids: Ids = None,
    epoch: OfEpoch = None,
    every: Every = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write dead letters to the target as an epoch of their own, each once: if table, topic or mapping is corrected.

    Without --sink, those of each sink that has any. Safe beside a running query, and to be repeated if it was
    interrupted. A row that is refused again stays a letter; then it ends with status 3.
    """
    chosen = _chosen(ids, epoch, every=every)
    total = Retried()
    with (
        answering(as_json=as_json) as answer,
        opened(checkpoint, sinks, None) as (place, given),
        _having(place, given, sink, chosen) as having,
    ):
        plan = []
        for name, letters in having.items():
            plan.append(f"write {letters.count(chosen)} dead letter(s) of sink '{name}' to its target, each once")
            if caution := letters.caution():
                plan.append(f"know that {caution}")
        answer.confirm(plan, yes=yes)
        for name, letters in having.items():
            with naming(name):
                done = letters.retry(chosen)
            total += done
            _tell_retried(answer, name, done)
            answer.values.update(asdict(total))
    if total.kept:
        raise typer.Exit(ATTENTION)


def _tell_retried(answer: VerbOutput, sink: str, done: Retried) -> None:
    answer.values.setdefault("sinks", []).append({"sink": sink, **asdict(done)})
    newer = f", {done.superseded} superseded by newer rows, which stay" if done.superseded else ""
    answer.say(f"sink '{sink}': {done.written} written{newer}, {done.kept} still dead letter(s)")
    if done.kept:
        answer.say(f"  for example: {done.reason}")


@app.command()
def drop(
    checkpoint: Checkpoint,
    *,
    sinks: Sinks,
    sink: OneSinkName = None,
    ids: Ids = None,
    epoch: OfEpoch = None,
    every: Every = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters for good: if their rows are not needed, or were loaded by other means."""
    chosen = _chosen(ids, epoch, every=every)
    with answering(as_json=as_json) as answer, opened(checkpoint, sinks, None) as (place, given):
        with _having(place, given, sink, chosen) as having:
            if len(having) > 1:
                # they are gone for good then
                raise ConfigurationError(
                    f"several sinks have such dead letters: {', '.join(having)}", hint="add --sink NAME, once for each"
                )
            ((name, letters),) = having.items()
            count = letters.count(chosen)
            answer.confirm([f"delete {count} dead letter(s) of sink '{name}': their rows are lost"], yes=yes)
            answer.values["dropped"] = letters.drop(chosen)
        answer.say(f"sink '{name}': dropped {answer.values['dropped']} dead letter(s)")


def _chosen(ids: Sequence[str] | None, epoch: int | None, *, every: bool) -> Chosen:
    if every == bool(ids or epoch is not None):
        raise typer.BadParameter("say which letters: by --id or --epoch, or --all of the sink")
    return Chosen(tuple(ids or ()), epoch)


@contextmanager
def _having(
    place: QueryCheckpoint, sinks: Mapping[str, Sink], sink: str | None, chosen: Chosen
) -> Iterator[Mapping[str, Letters]]:
    """Yield the letters of each sink that has chosen ones, or of the first one that can have any, if none has.

    Raises `ConfigurationError` if ids are chosen and several sinks have them: an id names a letter of one sink.
    """
    with _letters(place, sinks, sink) as letters_of:
        having = {name: letters for name, letters in letters_of.items() if letters.count(chosen)}
        if chosen.ids and len(having) > 1:
            raise ConfigurationError(
                f"several sinks have letters of these ids: {', '.join(having)}",
                hint="add --sink NAME, with the ids of that sink",
            )
        yield having or dict(list(letters_of.items())[:1])


@contextmanager
def _letters(place: QueryCheckpoint, sinks: Mapping[str, Sink], sink: str | None) -> Iterator[Mapping[str, Letters]]:
    """Yield the letters of each sink, or of the named one, that has joined the ledger and can have any.

    Raises `ConfigurationError` if there is none.
    """
    history = Ledger(place.files, "").read()
    owner = history.owner
    if owner is None:
        raise ConfigurationError(
            f"{place.location} has no ledger: epochsink has recorded nothing there", hint="give the query's checkpoint"
        )
    joined = {name: each for name, each in sinks.items() if name in owner.origins}
    if sink is not None and sink not in joined:
        raise ConfigurationError(
            f"the query has no sink '{sink}'", hint=f"of those in --sinks it has: {', '.join(joined) or 'none'}"
        )
    participants = participants_of(joined)
    letters_of: dict[str, Letters] = {}
    try:
        for participant in participants:
            place.open(participant, owner)
            for name in participant.members:
                if sink in {None, name} and (letters := participant.operator().letters(name)) is not None:
                    letters.applied = history.applied.get(name)
                    letters_of[name] = letters
        if not letters_of:
            raise ConfigurationError(
                f"{f'sink {sink!r} has' if sink else 'the sinks have'} no dead letters: nothing is set aside there",
                hint='rows are set aside by sinks with on_rejected="dead_letter"',
            )
        yield letters_of
    finally:
        for participant in participants:
            participant.close()


def _tell(answer: VerbOutput, sink: str, count: int, letters: Sequence[Letter]) -> None:
    answer.values["sinks"].append({"sink": sink, "count": count, "letters": [asdict(each) for each in letters]})
    answer.say(f"sink '{sink}': {count} dead letter(s)" + (f", the newest {len(letters)}:" if letters else ""))
    for each in letters:
        row = json.dumps(each.row, ensure_ascii=False, default=str)
        epoch = f"epoch {each.epoch}{' (pending)' if each.pending else ''}"
        answer.say(f"  {each.id}  {epoch}, {each.set_aside_at}: {f'{each.code} {each.error}'.strip()}")
        answer.say(f"    {row if len(row) <= _SHOWN else row[:_SHOWN] + ' ... (--json shows all of it)'}")
