"""Check the arguments of `ExactlyOnce` and of its `start`, and sinks against their live targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import pyarrow as pa
from pyspark.sql.streaming.readwriter import DataStreamWriter

from epochsink import arguments
from epochsink.errors import CheckFailed, ConfigurationError
from epochsink.protocol.joining import REWRITE
from epochsink.protocol.storage import refuse_credentials
from epochsink.sink import Sink, participants_of
from epochsink.spark.engines import engine_of, is_remote

_EXAMPLE: Final = "sinks={'table': Postgres(...)}"


def checked_checkpoint(checkpoint: str) -> str:
    """Return the checkpoint's place. Raises `ConfigurationError`."""
    if not checkpoint or not isinstance(checkpoint, str):
        raise ConfigurationError(
            f"checkpoint={checkpoint!r} is not the path or URI of a folder",
            hint="give the query's checkpointLocation as a string, e.g. checkpoint='s3a://lake/checkpoints/orders'",
        )
    refuse_credentials("checkpoint=", checkpoint)
    return checkpoint


def checked_sinks(sinks: Mapping[str, Sink]) -> dict[str, Sink]:
    """Return the sinks by name. Raises `ConfigurationError`."""
    if not isinstance(sinks, Mapping):
        raise ConfigurationError(
            f"sinks= got {_kind(sinks)}, and takes a dict, which gives each sink its name",
            hint=f"write {_EXAMPLE}; the name is part of the sink's identity in its target, so keep it",
        )
    if not sinks:
        raise ConfigurationError("sinks={} is empty", hint=f"give at least one sink, e.g. {_EXAMPLE}")
    for name, sink in sinks.items():
        if not name or not isinstance(name, str):
            raise ConfigurationError(
                f"sinks has the name {name!r}, which is not a string", hint=f"name each sink, e.g. {_EXAMPLE}"
            )
        _refuse_no_sink(name, sink)
    return dict(sinks)


def _refuse_no_sink(name: str, sink: object) -> None:
    if inspect.isclass(sink):
        raise ConfigurationError(
            f"sinks[{name!r}] is the class {sink.__name__}, not an object of it",
            hint=f"call it: {{{name!r}: {sink.__name__}(...)}}",
        )
    if not callable(getattr(sink, "participant", None)):
        raise ConfigurationError(
            f"sinks[{name!r}] is {_kind(sink)}, which is not a sink",
            hint="give Kafka(...), Postgres(...), Elasticsearch(...) or an object of epochsink.sink.Sink",
        )


def checked_spool(spool: str | None) -> str | None:
    """Return the spool's place. Raises `ConfigurationError`."""
    given = arguments.optional_text("spool", spool)
    refuse_credentials("spool=", given or "")
    if given is not None and not (urlparse(given).scheme or Path(given).is_absolute()):
        raise ConfigurationError(
            f"spool={given!r} is a relative path, which is a different place for the driver and for each executor",
            hint="give an absolute path or a URI that driver and executors share",
        )
    return given


def checked_join(join_running: bool | str) -> bool | str:  # noqa: FBT001 - it checks a flag
    """Return how to begin on a running pipeline's checkpoint. Raises `ConfigurationError`."""
    if not (isinstance(join_running, bool) or join_running == REWRITE):
        raise ConfigurationError(
            f"invalid join_running={join_running!r}: expected True, False or {REWRITE!r}",
            hint="for example join_running=True, for the first start on the checkpoint of a running pipeline",
        )
    return join_running


def refuse_bad_writer(writer: DataStreamWriter, checkpoint: str, sinks: Mapping[str, Sink], *, again: bool) -> None:
    """Refuse what is not a stream writer, and settings that `start` would override or that would duplicate rows.

    ``again``: this writer has been started before, so its foreachBatch is ours. Raises `ConfigurationError`.
    """
    untyped: Any = writer
    if not (isinstance(untyped, DataStreamWriter) or (is_remote(untyped) and hasattr(type(untyped), "foreachBatch"))):
        raise ConfigurationError(
            f"start() got {_kind(untyped)}, and takes a stream writer",
            hint="write sink.start(frame.writeStream), with .trigger(...), .queryName(...) and .outputMode(...) on the "
            "writer as you like",
        )
    engine = engine_of(writer)
    session = engine.frame_of(writer).sparkSession
    settings = engine.settings_of(writer)
    if not again and settings.source != session.conf.get("spark.sql.sources.default"):
        raise _taken(settings.source)
    given = settings.checkpoint
    if given is not None and engine.location_of(session, given) != engine.location_of(session, checkpoint):
        raise ConfigurationError(
            f"the stream writer has checkpointLocation={given!r}, and ExactlyOnce was given checkpoint={checkpoint!r}",
            hint="leave .option('checkpointLocation', ...) out: start() sets it",
        )
    refuse_complete(settings.output_mode, sinks)


def _taken(source: str) -> ConfigurationError:
    if source in ("foreachBatch", "foreach"):
        return ConfigurationError(
            f"the stream writer already has a function for .{source}(...), and start() would replace it",
            hint="leave it out; or let your own function change the rows and call the sink once: "
            "writeStream.foreachBatch(lambda frame, epoch: sink(changed(frame), epoch))"
            ".option('checkpointLocation', sink.checkpoint).start()",
        )
    return ConfigurationError(
        f"the stream writer already has .format({source!r}), and start() would replace it",
        hint="leave .format(...) out: sinks= says where the rows go",
    )


def refuse_complete(output_mode: str, sinks: Mapping[str, Sink]) -> None:
    """Raise `ConfigurationError` for output mode complete into a sink that appends."""
    if output_mode.lower() != "complete":
        return
    for name, sink in sinks.items():
        # with a key a row replaces the one before; without, the whole result is appended in each epoch
        if not getattr(sink, "key", None):
            raise ConfigurationError(
                f"sink '{name}' appends rows, and outputMode('complete') gives it the whole result again in every "
                "epoch: each row would be duplicated in each epoch",
                hint="give the sink a key= and use outputMode('update'), so that a changed row replaces the one "
                "before; or use a watermark and outputMode('append'), which gives each row once",
            )


def refuse_unfit(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> None:
    """Raise `CheckFailed` with every finding of every sink; ``schemas`` are those of its selected rows, by name."""
    findings = []
    for participant in participants_of(sinks):
        try:
            for name in participant.members:
                findings += [f"sink '{name}': {finding}" for finding in participant.check(name, schemas[name])]
        finally:
            # the run opens participants of its own, for a query id that may not be known yet
            participant.close()
    if findings:
        raise CheckFailed.of(findings)


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
