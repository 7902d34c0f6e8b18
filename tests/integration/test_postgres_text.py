"""Text that is not UTF-8 is refused wherever it would go in a table, and never becomes another text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from fix_postgres import Driver

from epochsink.errors import RowsRejected
from epochsink.postgres import Postgres
from epochsink.spark.query_plan import arrow_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from fix_postgres import Truth
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import PostgresService

TEXT: Final = "CASE WHEN id = 1 THEN CAST(X'61FF62' AS STRING) ELSE 'plain \u00e4' END"
COLUMNS: Final = {
    "text": ("text", TEXT),
    "document": ("jsonb", f"concat('\"', {TEXT}, '\"')"),
    "struct": ("jsonb", f"named_struct('deep', array(named_struct('t', {TEXT})))"),
    "a map's key": ("jsonb", f"map({TEXT}, 1)"),
    "json": ("json", f"named_struct('t', {TEXT})"),
    "list": ("text[]", f"array({TEXT})"),
    "converted": ("inet[]", f"array('::1', CASE WHEN id = 1 THEN {TEXT} END)"),
}
"""A column's type, and the SQL of its value in the stream."""


@pytest.fixture
def driver(postgres: PostgresService, pg_schema: str) -> Iterator[Callable[..., Driver]]:
    """Drivers of sinks on the table ``texts``."""
    made: list[Driver] = []

    def make(**options: Any) -> Driver:
        made.append(Driver(Postgres(postgres.dsn, table=f"{pg_schema}.texts", marker_schema=pg_schema, **options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows_of(spark: SparkSession, driver: Driver, value: str) -> pa.RecordBatch:
    """Return what the tasks get of two rows; also check the sink against the columns."""
    rows = spark.range(1, 3, numPartitions=1).selectExpr("id", f"{value} AS v")
    schema = arrow_schema(rows.schema)
    assert driver.committer.check(schema) == []
    planned = rows.selectExpr("struct(*) AS row").selectExpr(*driver.sink.columns("row", schema))
    (batch,) = planned.toArrow().to_batches()
    return batch


@pytest.mark.parametrize("case", COLUMNS)
def test_text_that_is_not_utf8_is_refused_or_set_aside(
    case: str, spark: SparkSession, pg_schema: str, pg_truth: Truth, driver: Callable[..., Driver]
) -> None:
    """Spark's JSON and Arrow's readers would write U+FFFD in place of such a byte."""
    kind, value = COLUMNS[case]
    table = f"{pg_schema}.texts"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, v {kind})")
    stops, aside = driver(), driver(on_rejected="dead_letter")
    with pytest.raises(RowsRejected, match="0xff") as refused:
        stops.run(0, rows_of(spark, stops, value))
    assert "not UTF-8" in refused.value.hint
    assert pg_truth.rows(table) == []
    aside.run(0, rows_of(spark, aside, value))
    assert [number for number, _ in pg_truth.rows(table)] == [2]
    assert pg_truth.count(f"{pg_schema}.dead_letter") == 1


def test_nested_decimals_keep_plain_digits(
    spark: SparkSession, pg_schema: str, pg_truth: Truth, driver: Callable[..., Driver]
) -> None:
    """In json, which keeps the text, as in jsonb."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.texts (id bigint, v json)")
    sink = driver()
    sink.run(0, rows_of(spark, sink, "named_struct('d', CAST(id - 1 AS DECIMAL(38,18)))"))
    found = pg_truth.execute(f"SELECT v::text FROM {pg_schema}.texts ORDER BY id")  # noqa: S608 - a name of the test's
    assert [text for (text,) in found] == ['{"d":0}', '{"d":1}']
