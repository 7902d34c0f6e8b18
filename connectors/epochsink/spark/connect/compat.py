"""Every attribute of PySpark's Connect client that is private, with a test in test_connect_queries.py.

PySpark has no public way from a stream writer to its frame and its settings.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epochsink.spark.engine import WriterSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the frame that a stream writer writes."""
    from pyspark.sql.connect.dataframe import DataFrame as RemoteFrame  # noqa: PLC0415 - needs grpcio

    untyped: Any = writer
    frame: Any = RemoteFrame(untyped._write_stream._child, untyped._session)
    typed: DataFrame = frame
    return typed


def settings_of(writer: DataStreamWriter) -> WriterSettings:
    """Return what has been set on a stream writer; PySpark can only set it."""
    untyped: Any = writer
    set_so = untyped._write_proto
    function = next((kind for kind in ("foreach_batch", "foreach_writer") if set_so.HasField(kind)), None)
    source = {"foreach_batch": "foreachBatch", "foreach_writer": "foreach"}.get(function or "", set_so.format)
    return WriterSettings(
        source=source or str(untyped._session.conf.get("spark.sql.sources.default")),
        output_mode=set_so.output_mode or "append",
        checkpoint=dict(set_so.options).get("checkpointLocation"),
    )


def option_of(writer: DataStreamWriter, name: str) -> str:
    """Return an option that has been set on a stream writer, "" if it has not; upper and lower case are the same."""
    untyped: Any = writer
    options = {key.lower(): str(value) for key, value in untyped._write_proto.options.items()}
    return options.get(name.lower(), "")
