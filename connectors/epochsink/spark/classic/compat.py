"""Every call of PySpark's that is private or differs between its versions, each with a test in test_spark_compat.py.

PySpark has no public way from Python to the JVM's session, or to the frame of a writer. What belongs to a running query
is in `epochsink.spark.classic.stream_execution`. If you try a new version of PySpark, look at these two modules first.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.util import PythonEvalType

from epochsink.spark.engine import WriterSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

_STATEFUL: Final = frozenset({"Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark", "GlobalLimit"})
"""Logical operators with state in a stream. Others are joins of two streams, and those with WithState in the name."""


def jvm_of(session: SparkSession) -> tuple[Any, Any]:
    """Return the JVM's view and its SparkSession."""
    untyped: Any = session
    return untyped._jvm, untyped._jsparkSession


def hadoop_configuration_of(session: SparkSession) -> Any:
    """Return the Hadoop configuration that the session's own queries use for their checkpoints."""
    _, java = jvm_of(session)
    return java.sessionState().newHadoopConf()


def byte_limit_of_batches(session: SparkSession) -> int:
    """Return how many bytes a record batch for a Python worker may have."""
    _, java = jvm_of(session)
    return int(java.sessionState().conf().arrowMaxBytesPerBatch())


def gateway_of(session: SparkSession) -> Any:
    """Return the py4j gateway."""
    context: Any = session.sparkContext
    return context._gateway


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the frame that a stream writer writes."""
    untyped: Any = writer
    frame: DataFrame = untyped._df
    return frame


def handle_of(query: StreamingQuery) -> Any:
    """Return the JVM's handle of a query."""
    untyped: Any = query
    return untyped._jsq


def settings_of(writer: DataStreamWriter) -> WriterSettings:
    """Return what has been set on a stream writer; PySpark can only set it."""
    untyped: Any = writer
    java = untyped._jwrite

    def field(name: str) -> Any:
        declared = java.getClass().getDeclaredField(name)
        declared.setAccessible(True)
        return declared.get(java)

    checkpoint = field("extraOptions").get("checkpointLocation")
    return WriterSettings(
        source=str(field("source")),
        output_mode=str(field("outputMode").toString()),
        checkpoint=str(checkpoint.get()) if checkpoint.isDefined() else None,
    )


def changeable(frame: DataFrame, expressions: Sequence[str]) -> list[str]:
    """Return those SQL expressions over a frame that may give another result each time, such as ``rand()``."""
    selected: Any = frame.selectExpr(*expressions)
    columns = selected._jdf.queryExecution().analyzed().expressions()
    return [expression for index, expression in enumerate(expressions) if not columns.apply(index).deterministic()]


def schema_text(frame: DataFrame) -> str:
    """Return the schema of a frame as JSON. Frames with equal schemas can use the same SQL."""
    untyped: Any = frame
    return str(untyped._jdf.schema().json())


def columns_of(expressions: Sequence[str]) -> Any:
    """Return the JVM's list of the columns of SQL expressions; any number of frames can use it."""
    jvm: Any = SparkContext._jvm
    columns: list[Any] = [functions.expr(expression) for expression in expressions]
    return jvm.PythonUtils.toSeq([column._jc for column in columns])


def select(frame: DataFrame, columns: Any) -> DataFrame:
    """Select `columns_of` from a frame, as ``selectExpr`` does, by one call of the JVM."""
    untyped: Any = frame
    return DataFrame(untyped._jdf.select(columns), frame.sparkSession)


def arrow_function(function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], answer: StructType) -> Any:
    """Return the JVM's form of a function for `map_in_arrow`. Any number of frames can use it; it gets all columns."""
    untyped: Any = pandas_udf
    udf = untyped(function, returnType=answer, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    return udf()._jc


def map_in_arrow(frame: DataFrame, function: Any) -> DataFrame:
    """Do what ``mapInArrow`` does, which pickles the function and makes thirty calls of the JVM each time."""
    untyped: Any = frame
    return DataFrame(untyped._jdf.mapInArrow(function, False, None), frame.sparkSession)  # noqa: FBT003 - no barrier


def has_state(plan: Any) -> bool:
    """Return whether a logical plan of the JVM keeps state from batch to batch."""
    return bool(_stateful(plan))


def unrepeatable_state(plan: Any) -> list[str]:
    """Return the SQL in or below stateful operators that may give another result each time, such as ``rand()``."""
    texts = [text for operator in _stateful(plan) for text in _changeable_in(operator)]
    return list(dict.fromkeys(texts))


def _stateful(plan: Any) -> list[Any]:
    """Return the uppermost operators with state in a plan."""
    kind = str(plan.getClass().getSimpleName())
    if plan.isStreaming() and (
        kind in _STATEFUL
        or "WithState" in kind
        or (kind == "Join" and all(child.isStreaming() for child in _listed(plan.children())))
    ):
        return [plan]
    return [operator for child in _listed(plan.children()) for operator in _stateful(child)]


def _changeable_in(plan: Any) -> list[str]:
    if plan.deterministic():
        return []
    own = [text for expression in _listed(plan.expressions()) for text in _changeable_parts(expression)]
    return own + [text for child in _listed(plan.children()) for text in _changeable_in(child)]


def _changeable_parts(expression: Any) -> list[str]:
    if expression.deterministic():
        return []
    smaller = [text for child in _listed(expression.children()) for text in _changeable_parts(child)]
    return smaller or [str(expression.sql())]


def _listed(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]
