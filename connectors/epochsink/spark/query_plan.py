"""The one query plan that feeds every sink: SQL text made once for each schema of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink.errors import ConfigurationError
from epochsink.sink.sql import operand, quoted
from epochsink.spark.compat import arrow_schema, changeable, columns_of, schema_text, select
from epochsink.spark.write_task import is_one_for_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

    from epochsink.sink import Sink

ROW: Final = "__epochsink_row_"

_INTERVAL: Final = '"interval"'
"""What the JSON of a schema calls a calendar's interval."""

_NEVER: Final = "spark_partition_id() < 0"
"""False for every row, and nothing that Spark's optimizer can find out. A filter that folds to false would have Spark
skip the plan below it, and with it the update of the state of a query with aggregations, then lost for good."""


@dataclass(frozen=True)
class OnePass:
    """SQL for the pass: ``rows`` adds each sink's selected struct, ``inputs`` makes each writer's columns of it.

    Each ``where=`` and ``select=`` is evaluated once a row, in ``rows``: what comes after refers to its result, so that
    ``rand()`` gives one answer. ``wanted`` drops rows for no sink, and never the whole plan. ``schemas`` are those of
    the sinks' selected rows, by name.
    """

    rows: Sequence[str]
    wanted: str | None
    distribute_by: Sequence[str]
    inputs: Sequence[str]
    schemas: Mapping[str, pa.Schema]

    def apply(self, frame: DataFrame) -> DataFrame:
        """Return a frame with one nullable struct column for each sink, null where a row is not for it.

        If there `is_one_for_all`, return a frame with the columns of its writer.
        """
        frame = select(frame, self._rows)
        # after the rows, by what they came to; where the predicates cannot change, Spark itself filters first
        if self.wanted is not None:
            frame = frame.where(self.wanted)
        if self.distribute_by:
            frame = frame.selectExpr("*", f"struct({', '.join(self.distribute_by)}) AS {ROW}key")
            frame = frame.repartition(frame.sparkSession.sparkContext.defaultParallelism, f"{ROW}key")
        return select(frame, self._inputs)

    # each epoch has a frame of its own, of the same columns: so the JVM's form of the SQL is made once

    @cached_property
    def _rows(self) -> Any:
        return columns_of(["*", *self.rows])

    @cached_property
    def _inputs(self) -> Any:
        return columns_of(self.inputs)


def row_schemas(frame: DataFrame, sinks: Mapping[str, Sink]) -> dict[str, pa.Schema]:
    """Return the Arrow schema of each sink's selected row; no data moves.

    Raises `ConfigurationError` for SQL that Spark refuses, and for types that Arrow has no name for.
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
    """Raise `ConfigurationError`, which names the sink, for a pass that Spark cannot plan; no data moves."""
    for name, sink in sinks.items():
        try:
            sink.check_columns(_writer_schema(name, sink, one_pass({name: sink}, schemas).apply(frame)))
        except PySparkException as refused:
            raise ConfigurationError(
                f"sink '{name}': Spark refuses the SQL of its options: {refused}",
                hint=f"correct select=, where=, delete_when= and key=; the stream's columns are: "
                f"{', '.join(frame.columns)}",
            ) from refused
        _refuse_changeable(name, sink, frame)
    one_pass(sinks, schemas).apply(frame)


def _writer_schema(name: str, sink: Sink, planned: DataFrame) -> pa.Schema:
    """Return the schema of a sink's writer in a pass for it alone."""
    if is_one_for_all({name: sink}):
        return arrow_schema(planned.schema)
    return arrow_schema(planned.select(f"{planned.columns[0]}.*").schema)


def _refuse_changeable(name: str, sink: Sink, frame: DataFrame) -> None:
    """Refuse a key by which rows would be spread over tasks anew, with another result, when Spark repeats a stage."""
    found = changeable(frame, sink.distribute_by)
    if found:
        raise ConfigurationError(
            f"sink '{name}' spreads rows over tasks by its key, and this key is another each time that Spark evaluates "
            f"it, so that a repeated task would lose or double rows: {', '.join(found)}",
            hint="use atomic=True (PostgreSQL) or no partition_by_key= (Elasticsearch), or a key that the rows bring "
            "with them",
        )


def _refuse_duplicates(name: str, columns: Sequence[str]) -> None:
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise ConfigurationError(
            f"sink '{name}' selects the column name(s) {', '.join(twice)} more than once",
            hint="give each selected expression a name of its own with AS",
        )


def one_pass(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> OnePass:
    """Make the SQL of the pass for sinks whose rows have these schemas."""
    rows: list[str] = []
    inputs: list[str] = []
    for index, (name, sink) in enumerate(sinks.items()):
        row = f"{ROW}{index}"
        # a line each, so that a comment in one ends with it
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
    """Return what lets a row in that some sink wants; None if one wants them all."""
    if None in predicates:
        return None
    return " OR ".join([*(f"{ROW}{index} IS NOT NULL" for index in range(len(predicates))), _NEVER])


def _distribution(sinks: Mapping[str, Sink]) -> Sequence[str]:
    wishes = {name: tuple(sink.distribute_by) for name, sink in sinks.items() if sink.distribute_by}
    if len(set(wishes.values())) > 1:
        raise ConfigurationError(
            "sinks ask for rows to be spread over tasks in different ways: "
            + "; ".join(f"'{name}' by {', '.join(keys)}" for name, keys in wishes.items()),
            hint="give them the same key, use atomic=True (PostgreSQL) or no partition_by_key= (Elasticsearch), or "
            "feed one of them by a query of its own",
        )
    # the shuffle brings the rows of a key to its task in any order, and the one pass has it for all sinks or for none
    if wishes and (ordered := [name for name, sink in sinks.items() if sink.keeps_order]):
        raise ConfigurationError(
            f"sink '{ordered[0]}' keeps the order of the rows of a key, and sink '{next(iter(wishes))}' needs a "
            "shuffle of all rows by its own key, which loses that order",
            hint="use atomic=True (PostgreSQL), no partition_by_key= (Elasticsearch), or feed one of them by a query "
            "of its own; Elasticsearch with order_by= needs no order of the rows",
        )
    return next(iter(wishes.values()), ())


def run_for_state(frame: DataFrame) -> None:
    """Run the whole plan of a frame, and nothing else: an action that writes no row anywhere."""
    # the place that takes all rows takes no column with a calendar's interval in it, at whatever depth
    if _INTERVAL in schema_text(frame):
        frame = frame.select([_written(field) for field in frame.schema])
    frame.write.format("noop").mode("overwrite").save()


def _written(field: StructField) -> Column:
    column = F.col(quoted(field.name))
    return column.cast("string").alias(field.name) if _INTERVAL in field.json() else column
