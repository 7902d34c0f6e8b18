"""Examine all that a pipeline needs before it starts: versions, checkpoint store, executors and targets."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import TYPE_CHECKING, Final

from epochsink.cli.checkpoint_folder import QueryCheckpoint, open_files, session
from epochsink.cli.console import ATTENTION, explanation_of
from epochsink.cli.operation import names
from epochsink.cli.sinks_option import Loaded, imported
from epochsink.cli.status import SOON_SECONDS, read_status
from epochsink.errors import Addresses
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.storage import refuse_unconditional_create
from epochsink.sink import Finding, Sink, comparing, participants_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_PACKAGES: Final = (
    "epochsink",
    "pyspark",
    "pyspark-client",
    "pyarrow",
    "psycopg",
    "confluent-kafka",
    "kafka-python",
    "elasticsearch",
    "opensearch-py",
)


class Health(enum.StrEnum):
    """What a line says: all is well, a person should look, no epoch can be written as it is, or it was not examined."""

    WELL = "well"
    ATTENTION = "attention"
    WRONG = "wrong"
    NOT_EXAMINED = "not examined"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was examined: of what, what it is, what was found, and what to do unless ``hint`` is empty."""

    of: str
    what: str
    state: Health
    found: str
    hint: str = ""

    def __str__(self) -> str:
        """Return the line for a person."""
        return f"{self.state:<12} {self.of}, {self.what}: {self.found}" + (f"; {self.hint}" if self.hint else "")


def examine(loaded: Loaded, reference: str, frame: str | None) -> Iterator[Line]:
    """Yield a line for each thing as it is examined. To be called inside of `import_guard.no_queries`.

    ``reference`` is the MODULE:ATTRIBUTE that was loaded, ``frame`` that of the stream's DataFrame, or of a
    function that returns it for a session. What fails is a line, too. Raises `ConfigurationError` for a wrong
    ``frame``.
    """
    addresses = Addresses(str(loaded.checkpoint or ""), reference, loaded.spool or "")
    for line in _examined(loaded, reference, frame):
        yield replace(line, found=addresses.complete(line.found), hint=addresses.complete(line.hint))


def _examined(loaded: Loaded, reference: str, frame: str | None) -> Iterator[Line]:
    with comparing() as would:
        yield Line("this machine", "versions", Health.WELL, _versions())
        with session() if frame else nullcontext():
            if loaded.checkpoint is None:
                hint = "name the ExactlyOnce object in place of a dict of sinks"
                yield Line("checkpoint", "store", Health.NOT_EXAMINED, "the checkpoint is not known", hint)
                yield from _executors()
            else:
                yield from _failing("checkpoint", "store", _checkpoint(loaded, reference))
            for participant in participants_of(loaded.sinks):
                with closing(participant):
                    for name in participant.members:
                        lines = (_line(name, finding) for finding in participant.operator().examine(name))
                        known = len(would)
                        yield from _failing(f"sink '{name}'", "target", lines)
                        yield from _of_a_start(name, would[known:])
            yield from _stream(frame, loaded.sinks, would)


def status_of(states: Collection[Health]) -> int:
    """Return the exit status: 1 if something is wrong, 3 if a person should look, else 0."""
    return 1 if Health.WRONG in states else ATTENTION if Health.ATTENTION in states else 0


def _versions() -> str:
    packages = []
    for name in _PACKAGES:
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            # of an extra that this pipeline does not need, or its sinks could not have been made
            continue
    return ", ".join([*packages, f"Python {python_version()}"])


def _line(sink: str, finding: Finding) -> Line:
    state = Health.WRONG if finding.is_fatal else Health.ATTENTION if finding.hint else Health.WELL
    return Line(f"sink '{sink}'", finding.what, state, finding.found, finding.hint)


def _failing(of: str, what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """Yield lines; a failure ends them, and is the last one. A defect is raised."""
    try:
        yield from lines
    except Exception as failure:
        explanation = explanation_of(failure)
        if explanation is None:
            raise
        yield Line(of, what, Health.WRONG, explanation["message"], explanation["hint"])


def _checkpoint(loaded: Loaded, reference: str) -> Iterator[Line]:
    with open_files(str(loaded.checkpoint), loaded.spool, loaded.storage_options) as opened:
        refuse_unconditional_create(opened.files, opened.location)
        yield Line(
            "checkpoint",
            "store",
            Health.WELL,
            f"{opened.location} creates files conditionally: of creates at the same time one succeeded",
        )
        if any(sink.spool is not False for sink in loaded.sinks.values()):
            opened.spool.check()
            yield Line("checkpoint", "spool", Health.WELL, f"{opened.spool.root} answers")
        yield from _executors()
        query_id = Checkpoint(opened.files).query_id()
        if query_id is None:
            yield Line("checkpoint", "query", Health.WELL, "none has run here")
            return
        typed = ["--sinks", reference, *([] if opened.spool.beside_ledger else ["--spool", opened.spool.root])]
        state = read_status(QueryCheckpoint(opened.files, opened.location, opened.spool, query_id), loaded.sinks, typed)
        is_well = not (state.damage or state.needs_person) and state.late_seconds < SOON_SECONDS
        hint = "" if is_well else f"epochsink status {shlex.join([opened.location, *typed])}"
        yield Line("checkpoint", "query", Health.WELL if is_well else Health.ATTENTION, state.headline, hint)
        for target in state.targets:
            of = f"sink {names(target.sinks)}"
            yield from (Line(of, "marker", Health.WRONG, each.message, each.hint) for each in target.disagreements)
            # a target that does not answer has a line of its own
            if not (target.disagreements or target.error):
                yield Line(of, "marker", Health.WELL, "target and ledger agree")


def _executors() -> Iterator[Line]:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - takes a second, and may be missing on an operator's host
    except ModuleNotFoundError:
        yield Line("executors", "Python", Health.NOT_EXAMINED, "PySpark is not installed here")
        return
    spark = SparkSession.getActiveSession()
    if spark is None:
        hint = "with --frame a Spark session is started, as spark-defaults.conf says"
        yield Line("executors", "Python", Health.NOT_EXAMINED, "there is no Spark session", hint)
        return
    yield from _failing("executors", "Python", _asked(spark))


def _asked(spark: SparkSession) -> Iterator[Line]:
    from epochsink.spark.engines import engine_of  # noqa: PLC0415 - likewise

    engine_of(spark).refuse_bare_executors(spark)
    yield Line(
        "executors", "Python", Health.WELL, f"Spark {spark.version}: executors have everything that a task needs"
    )


def _of_a_start(sink: str, would: Sequence[str]) -> Iterator[Line]:
    yield from (Line(f"sink '{sink}'", "start", Health.WELL, f"would {each}") for each in would)


def _stream(frame: str | None, sinks: Mapping[str, Sink], would: list[str]) -> Iterator[Line]:
    if frame is None:
        hint = "add --frame MODULE:ATTRIBUTE, the stream's DataFrame or a function of the session that returns it"
        yield Line("stream", "columns", Health.NOT_EXAMINED, "the stream is not known", hint)
        return
    with session() as spark:
        given = imported(frame, "--frame")
        yield from _failing("stream", "columns", _columns(given(spark) if callable(given) else given, sinks, would))


def _columns(frame: DataFrame, sinks: Mapping[str, Sink], would: list[str]) -> Iterator[Line]:
    from epochsink.spark.query_plan import refuse_bad_plan, row_schemas  # noqa: PLC0415 - likewise

    schemas = row_schemas(frame, sinks)
    for participant in participants_of(sinks):
        with closing(participant):
            for name in participant.members:
                known = len(would)
                for each in (findings := participant.check(name, schemas[name])):
                    yield Line(f"sink '{name}'", "columns", Health.WRONG, each)
                yield from _of_a_start(name, would[known:])
                if not findings:
                    fits = f"{', '.join(schemas[name].names)} fit the target"
                    yield Line(f"sink '{name}'", "columns", Health.WELL, fits)
    refuse_bad_plan(frame, sinks, schemas)
    yield Line("stream", "plan", Health.WELL, "one pass feeds every sink")
