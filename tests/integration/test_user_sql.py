"""SQL that users give is part of larger expressions: a comment in it must end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from epochsink import ConfigurationError, Elasticsearch, Kafka, Postgres
from epochsink.spark.query_plan import one_pass, refuse_bad_plan, row_schemas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from epochsink.sink import Sink


def sinks(**options: Any) -> dict[str, Sink]:
    return {
        "table": Postgres("postgresql://nobody@127.0.0.1/x", table="t", key="id", **options),
        "topic": Kafka(bootstrap_servers="127.0.0.1:9092", topic="t", key="id", **options),
        "index": Elasticsearch("http://127.0.0.1:9200", index="i", key="id", **options),
    }


@pytest.mark.parametrize("comment", ["", " -- gone", " /* gone */", " -- gone (\n -- for good"])
@pytest.mark.parametrize("family", ["table", "topic", "index"])
def test_a_comment_in_an_option_ends_with_it(spark: SparkSession, family: str, comment: str) -> None:
    changes = spark.createDataFrame([(1, "D"), (2, "U"), (3, "X")], "id BIGINT, op STRING")
    sink = sinks(delete_when=f"op = 'D'{comment}", where=f"op <> 'X'{comment}", select=["id", f"op AS op{comment}"])
    one: dict[str, Sink] = {family: sink[family]}
    planned = one_pass(one, row_schemas(changes, one)).apply(changes)
    found = [row[0].asDict() for row in planned.collect()]
    gone = {"table": "epochsink_delete", "topic": "json", "index": "source"}[family]
    assert [bool(row[gone]) if family == "table" else row[gone] is None for row in found] == [True, False]


@pytest.mark.parametrize("broken", ["op = 'D", "op = 'D' /* gone", "op = 'D')", "(op = 'D'"])
@pytest.mark.parametrize("family", ["table", "topic", "index"])
def test_sql_that_does_not_stand_alone_is_refused_before_any_row_moves(
    spark: SparkSession, family: str, broken: str
) -> None:
    changes = spark.createDataFrame([(1, "D")], "id BIGINT, op STRING")
    one: dict[str, Sink] = {family: sinks(delete_when=broken)[family]}
    with pytest.raises(ConfigurationError, match=f"sink '{family}': Spark refuses the SQL of its options"):
        refuse_bad_plan(changes, one, row_schemas(changes, one))
