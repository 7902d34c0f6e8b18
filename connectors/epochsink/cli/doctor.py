"""Examine all that a pipeline needs before it starts: versions, checkpoint store, executors and targets."""

from __future__ import annotations

import enum
from contextlib import closing, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import TYPE_CHECKING, Final

from epochsink.cli.checkpoint_folder import Place, open_files, session
from epochsink.cli.console import ATTENTION, told_of
from epochsink.cli.sinks_option import imported
from epochsink.cli.status import SOON_SECONDS, read_status
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.storage import refuse_unconditional_create
from epochsink.sink import participants_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from epochsink.cli.sinks_option import Loaded
    from epochsink.sink import Finding, Sink

_PACKAGES: Final = (
    "epochsink",
    "pyspark",
    "pyspark-client",
    "pyarrow",
    "psycopg",
    "confluent-kafka",
    "kafka-python",
    "elasticsearch",
)


class State(enum.StrEnum):
    """What a line says: all is well, a person should look, no epoch can be written as it is, or nobody looked."""

    WELL = "well"
    ATTENTION = "attention"
    WRONG = "wrong"
    NOT_EXAMINED = "not examined"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was examined: of what, what it is, what was found, and what to do unless ``hint`` is empty."""

    of: str
    what: str
    state: State
    found: str
    hint: str = ""

    def __str__(self) -> str:
        """Return the line for a person."""
        return f"{self.state:<12} {self.of}, {self.what}: {self.found}" + (f"; {self.hint}" if self.hint else "")


def examine(loaded: Loaded, frame: str | None) -> Iterator[Line]:
    """Yield a line for each thing as it is examined. To be called inside of `import_guard.no_queries`.

    ``frame`` names the stream's DataFrame, or a function that returns it for a session, as MODULE:ATTRIBUTE. What fails
    is a line, too. Raises `ConfigurationError` for a wrong ``frame``.
    """
    yield Line("this machine", "versions", State.WELL, _versions())
    with session() if frame else nullcontext():
        if loaded.checkpoint is None:
            hint = "name the ExactlyOnce object in place of a dict of sinks"
            yield Line("checkpoint", "store", State.NOT_EXAMINED, "the checkpoint is not known", hint)
            yield from _executors()
        else:
            yield from _failing("checkpoint", "store", _checkpoint(loaded))
        for participant in participants_of(loaded.sinks):
            with closing(participant):
                for name in participant.members:
                    found = (_line(name, finding) for finding in participant.examine(name))
                    yield from _failing(f"sink '{name}'", "target", found)
        yield from _stream(frame, loaded.sinks)


def status_of(states: Collection[State]) -> int:
    """Return the exit status: 1 if something is wrong, 3 if a person should look, else 0."""
    return 1 if State.WRONG in states else ATTENTION if State.ATTENTION in states else 0


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            # of an extra that this pipeline does not need, or its sinks could not have been made
            continue
    return ", ".join([*found, f"Python {python_version()}"])


def _line(sink: str, finding: Finding) -> Line:
    state = State.WRONG if finding.is_fatal else State.ATTENTION if finding.hint else State.WELL
    return Line(f"sink '{sink}'", finding.what, state, finding.found, finding.hint)


def _failing(of: str, what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """Yield lines; a failure ends them, and is the last one. A defect is raised."""
    try:
        yield from lines
    except Exception as failure:
        told = told_of(failure)
        if told is None:
            raise
        yield Line(of, what, State.WRONG, told["message"], told["hint"])


def _checkpoint(loaded: Loaded) -> Iterator[Line]:
    with open_files(str(loaded.checkpoint), loaded.spool, loaded.storage_options) as opened:
        refuse_unconditional_create(opened.files, opened.location)
        yield Line(
            "checkpoint",
            "store",
            State.WELL,
            f"{opened.location} creates files conditionally, as creates at the same time showed",
        )
        if any(sink.spool is not False for sink in loaded.sinks.values()):
            opened.spool.check()
            yield Line("checkpoint", "spool", State.WELL, f"{opened.spool.root} answers")
        yield from _executors()
        query_id = Checkpoint(opened.files).query_id()
        if query_id is None:
            yield Line("checkpoint", "query", State.WELL, "none has run here")
            return
        found = read_status(Place(opened.files, opened.location, opened.spool, query_id))
        is_well = not found.damage and found.late_seconds < SOON_SECONDS
        hint = "" if is_well else f"epochsink status {opened.location}"
        yield Line("checkpoint", "query", State.WELL if is_well else State.ATTENTION, found.headline, hint)


def _executors() -> Iterator[Line]:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - takes a second, and may be missing on an operator's host
    except ModuleNotFoundError:
        yield Line("executors", "Python", State.NOT_EXAMINED, "PySpark is not installed here")
        return
    spark = SparkSession.getActiveSession()
    if spark is None:
        hint = "with --frame a Spark session is started, as spark-defaults.conf says"
        yield Line("executors", "Python", State.NOT_EXAMINED, "there is no Spark session", hint)
        return
    yield from _failing("executors", "Python", _asked(spark))


def _asked(spark: SparkSession) -> Iterator[Line]:
    from epochsink.spark.engines import engine_of  # noqa: PLC0415 - likewise

    engine_of(spark).refuse_bare_executors(spark)
    yield Line("executors", "Python", State.WELL, f"Spark {spark.version}: an executor has all that a task needs")


def _stream(frame: str | None, sinks: Mapping[str, Sink]) -> Iterator[Line]:
    if frame is None:
        hint = "add --frame MODULE:ATTRIBUTE, the stream's DataFrame or a function of the session that returns it"
        yield Line("stream", "columns", State.NOT_EXAMINED, "the stream is not known", hint)
        return
    with session() as spark:
        given = imported(frame, "--frame")
        yield from _failing("stream", "columns", _columns(given(spark) if callable(given) else given, sinks))


def _columns(frame: DataFrame, sinks: Mapping[str, Sink]) -> Iterator[Line]:
    from epochsink.spark.query_plan import refuse_bad_plan, row_schemas  # noqa: PLC0415 - likewise

    schemas = row_schemas(frame, sinks)
    for participant in participants_of(sinks):
        with closing(participant):
            for name in participant.members:
                for each in (found := participant.check(name, schemas[name])):
                    yield Line(f"sink '{name}'", "columns", State.WRONG, each)
                if not found:
                    fits = f"{', '.join(schemas[name].names)} fit the target"
                    yield Line(f"sink '{name}'", "columns", State.WELL, fits)
    refuse_bad_plan(frame, sinks, schemas)
    yield Line("stream", "plan", State.WELL, "one pass feeds every sink")
