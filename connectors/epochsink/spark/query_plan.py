"""Make the one query plan that feeds every sink, as SQL made once for each schema of a stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas import types  # private, and needs no JVM

from epochsink.errors import ConfigurationError
from epochsink.sink import Sink
from epochsink.sink.sql import operand, quoted
from epochsink.spark.engines import engine_of
from epochsink.spark.placement import loose_columns, texts_as_times, unsettled
from epochsink.spark.write_task import is_one_for_all

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType


ROW: Final = "__epochsink_row_"

_NO_AVRO: Final = "AVRO_NOT_LOADED_SQL_FUNCTIONS_UNUSABLE"
_INTERVAL: Final = '"interval"'
"""The name of a calendar interval in the JSON of a schema."""

_NEVER: Final = "spark_partition_id() < 0"
"""False for every row, but not for Spark's optimizer. If a filter folded to false, Spark would skip the plan below it,
and the update of the query's state would be lost for good."""

# 4.0 and 4.1 always use UTC, later versions need it as an argument
_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(types.to_arrow_schema).parameters else {}
)


@dataclass(frozen=True)
class OnePass:
    """The SQL of the pass: ``rows`` adds each sink's selected struct, ``inputs`` makes each writer's columns from it.

    Each ``where=`` and ``select=`` is evaluated once a row, in ``rows``. What follows refers to the result, so that
    ``rand()`` has one value. ``wanted`` drops rows that no sink wants. ``schemas`` are those of the sinks' selected
    rows, by name.
    """

    rows: Sequence[str]
    wanted: str | None
    distribute_by: Sequence[str]
    inputs: Sequence[str]
    schemas: Mapping[str, pa.Schema]
    # each epoch has its own frame with the same columns: so the JVM's form of the SQL is made once
    _selections: list[Callable[[DataFrame], DataFrame]] = field(default_factory=list, repr=False, compare=False)

    def apply(self, frame: DataFrame) -> DataFrame:
        """Return a frame with one struct column for each sink, null if a row is not for the sink.

        If there `is_one_for_all`, return a frame with the columns of its writer.
        """
        engine = engine_of(frame.sparkSession)
        if not self._selections:
            self._selections.extend([engine.selection(["*", *self.rows]), engine.selection(self.inputs)])
        add_rows, take_inputs = self._selections
        frame = add_rows(frame)
        # after the rows, from their result; Spark itself filters first if the predicates are deterministic
        if self.wanted is not None:
            frame = frame.where(self.wanted)
        if self.distribute_by:
            frame = frame.selectExpr("*", f"struct({', '.join(self.distribute_by)}) AS {ROW}key")
            frame = frame.repartition(engine.parallelism(frame.sparkSession), f"{ROW}key")
        return take_inputs(frame)


def row_schemas(frame: DataFrame, sinks: Mapping[str, Sink]) -> dict[str, pa.Schema]:
    """Return the Arrow schema of each sink's selected row; no data moves.

    Raises `ConfigurationError` for SQL that Spark refuses, and for types that Arrow lacks.
    """
    schemas = {}
    for name, sink in sinks.items():
        try:
            selected = frame.selectExpr(*sink.select)
            if sink.where is not None:
                frame.where(sink.where)
            schemas[name] = arrow_schema(selected.schema)
        except PySparkException as refused:
            raise ConfigurationError(
                f"sink '{name}': Spark refuses its select={list(sink.select)!r}, where={sink.where!r}: {refused}",
                hint=f"the stream's columns are: {', '.join(frame.columns)}; cast types that Arrow lacks "
                "(intervals of months) to a string or number in select=",
            ) from refused
        _refuse_duplicates(name, selected.columns)
    return schemas


def refuse_bad_plan(frame: DataFrame, sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> None:
    """Raise `ConfigurationError` with the sink's name if Spark cannot plan the pass; no data moves."""
    for name, sink in sinks.items():
        try:
            sink.check_columns(_writer_schema(name, sink, one_pass({name: sink}, schemas).apply(frame)))
        except PySparkException as refused:
            if refused.getCondition() == _NO_AVRO:
                raise ConfigurationError(
                    f"sink '{name}' writes Avro, and the session lacks Spark's functions for it",
                    hint="add org.apache.spark:spark-avro_2.13:"
                    f"{frame.sparkSession.version} to spark.jars.packages of the session",
                ) from refused
            raise ConfigurationError(
                f"sink '{name}': Spark refuses the SQL of its options: {refused}",
                hint=f"correct select=, where=, delete_when= and key=; the stream's columns are: "
                f"{', '.join(frame.columns)}",
            ) from refused
        _refuse_changeable(name, sink, frame)
    refuse_loose_placement(frame, sinks, schemas)
    one_pass(sinks, schemas).apply(frame)


def _writer_schema(name: str, sink: Sink, planned: DataFrame) -> pa.Schema:
    """Return the schema of a sink's writer in a pass for it alone."""
    if is_one_for_all({name: sink}):
        return arrow_schema(planned.schema)
    return arrow_schema(planned.select(f"{planned.columns[0]}.*").schema)


def _refuse_changeable(name: str, sink: Sink, frame: DataFrame) -> None:
    """Refuse a key that is not deterministic: if Spark repeats a stage, rows would go to other tasks than before."""
    expressions = engine_of(frame.sparkSession).changeable(frame, sink.distribute_by)
    if expressions:
        raise ConfigurationError(
            f"sink '{name}' distributes rows over tasks by its key, and the key changes each time that Spark evaluates "
            f"it, so a repeated task would lose or duplicate rows: {', '.join(expressions)}",
            hint="use atomic=True (PostgreSQL) or no partition_by_key= (Elasticsearch), or a key that is a column of "
            "the source",
        )


def refuse_loose_placement(frame: DataFrame, sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> None:
    """Raise `ConfigurationError` if something besides the key decides where the row of a key is stored."""
    for name, sink in sinks.items():
        placed_by, key = sink.placement(schemas[name])
        for argument, expression in placed_by.items():
            if words := unsettled(expression, frame.columns) or texts_as_times(frame, expression):
                raise ConfigurationError(
                    f"sink '{name}': {argument}={expression!r} has {', '.join(words)}, and it is not known whether "
                    "that has the same value each time: rows of one key could be stored in different places, and its "
                    "document would exist twice",
                    hint="use columns, and Spark's own functions of them; give to_date and to_timestamp a format, "
                    "without which some texts mean the present day; compute anything else in a column of the stream, "
                    "and make that column a part of key=",
                )
            if loose := loose_columns(frame, expression, key):
                raise ConfigurationError(
                    f"sink '{name}': {argument}={expression!r} depends on {', '.join(loose)}, and the key does not: "
                    "rows of one key could be stored in different places, and its document would exist twice",
                    hint=f"make it depend on columns of the key only, or add what it depends on to the key, e.g. "
                    f"key={[*key, loose[0]]}",
                )


def _refuse_duplicates(name: str, columns: Sequence[str]) -> None:
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise ConfigurationError(
            f"sink '{name}' selects the column name(s) {', '.join(twice)} more than once",
            hint="give each selected expression its own name with AS",
        )


def one_pass(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> OnePass:
    """Make the SQL of the pass for sinks whose rows have these schemas."""
    rows: list[str] = []
    inputs: list[str] = []
    for index, (name, sink) in enumerate(sinks.items()):
        row = f"{ROW}{index}"
        # each on its own line, which ends a comment in it
        selected = "struct(" + "\n, ".join(sink.select) + "\n)"
        chosen = selected if sink.where is None else f"IF({operand(sink.where)}, {selected}, NULL)"
        rows.append(f"{chosen} AS {row}")
        columns = sink.columns(row, schemas[name])
        written = f"struct({', '.join(columns)})"
        if is_one_for_all(sinks):
            inputs.extend(columns)
        elif sink.where is None:
            inputs.append(f"{written} AS sink_{index}")
        else:
            inputs.append(f"IF({row} IS NOT NULL, {written}, NULL) AS sink_{index}")
    return OnePass(rows, _wanted([sink.where for sink in sinks.values()]), _distribution(sinks), inputs, schemas)


def _wanted(predicates: Sequence[str | None]) -> str | None:
    """Return a predicate for the rows that at least one sink wants; None if a sink wants all rows."""
    if None in predicates:
        return None
    return " OR ".join([*(f"{ROW}{index} IS NOT NULL" for index in range(len(predicates))), _NEVER])


def _distribution(sinks: Mapping[str, Sink]) -> Sequence[str]:
    wishes = {name: tuple(sink.distribute_by) for name, sink in sinks.items() if sink.distribute_by}
    if len(set(wishes.values())) > 1:
        raise ConfigurationError(
            "sinks need rows to be distributed over tasks in different ways: "
            + "; ".join(f"'{name}' by {', '.join(keys)}" for name, keys in wishes.items()),
            hint="give them the same key, use atomic=True (PostgreSQL) or no partition_by_key= (Elasticsearch), or "
            "write one of them in a separate query",
        )
    # a shuffle loses the order of a key's rows, and the one pass has a shuffle for all sinks or for none
    if wishes and (ordered := [name for name, sink in sinks.items() if sink.keeps_order]):
        raise ConfigurationError(
            f"sink '{ordered[0]}' keeps the order of the rows of a key, and sink '{next(iter(wishes))}' needs a "
            "shuffle of all rows by its own key, which loses that order",
            hint="use atomic=True (PostgreSQL), no partition_by_key= (Elasticsearch), or write one of them in a "
            "separate query; Elasticsearch with order_by= does not depend on the order of the rows",
        )
    return next(iter(wishes.values()), ())


def run_for_state(frame: DataFrame) -> None:
    """Run the whole plan of a frame for its effect on state: an action that writes no row anywhere."""
    # Spark's noop sink refuses columns that contain calendar intervals, at any depth
    if _INTERVAL in engine_of(frame.sparkSession).schema_text(frame):
        frame = frame.select([_written(field) for field in frame.schema])
    frame.write.format("noop").mode("overwrite").save()


def _written(field: StructField) -> Column:
    column = F.col(quoted(field.name))
    return column.cast("string").alias(field.name) if _INTERVAL in field.json() else column


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a frame's, with timestamps in UTC. Raises PySparkException for a type without one."""
    return types.to_arrow_schema(schema, **_UTC)
