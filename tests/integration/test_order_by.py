"""order_by= decides between rows of a key as Spark's own ORDER BY does, in every target, for every type."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from streams import Stream

from epochsink import Elasticsearch, Postgres
from epochsink.elasticsearch.connection import connect
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import FreshName
    from pyspark.sql import DataFrame, SparkSession

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, PostgresService

VALUES = [
    ["double('NaN')", "double('Infinity')", "double('-Infinity')", "1D", "-0D", "0D", "CAST(NULL AS DOUBLE)"],
    ["float('NaN')", "float('-NaN')", "float(-1)", "float(-0.0)", "float(0)", "CAST(NULL AS FLOAT)"],
    ["''", "'Z'", "'a'", "'ä'", "'\U0001f600'", "'\uffff'", "CAST(NULL AS STRING)"],
    ["X''", "X'00'", "X'7f'", "X'80'", "X'ff'", "CAST(NULL AS BINARY)"],
    ["true", "false", "CAST(NULL AS BOOLEAN)"],
    ["DATE'0001-01-01'", "DATE'1969-12-31'", "DATE'9999-12-31'", "CAST(NULL AS DATE)"],
    ["TIMESTAMP'1969-12-31 23:59:59.999999Z'", "TIMESTAMP'1970-01-01 00:00:00Z'", "CAST(NULL AS TIMESTAMP)"],
    ["9.9BD", "-9.9BD", "0.0BD", "10.0BD", "CAST(NULL AS DECIMAL(3,1))"],
    [
        "INTERVAL '1' DAY",
        "INTERVAL '-1' DAY",
        "INTERVAL '23:59:59' HOUR TO SECOND",
        "CAST(NULL AS INTERVAL DAY TO SECOND)",
    ],
]
PAIRS = 1000


def ranked(rows: DataFrame) -> DataFrame:
    """Return rows in pairs of one key, each with one of the values of one type; a pair for each two values."""
    made = rows.selectExpr("id", f"id div {PAIRS} AS kind", f"(id % {PAIRS}) div 2 AS key", "id % 2 AS place")
    for kind, values in enumerate(VALUES):
        size = len(values)
        value = f"element_at(array({', '.join(values)}), int(IF(place = 0, key div {size}, key % {size})) + 1)"
        made = made.withColumn(f"r{kind}", F.expr(f"IF(kind = {kind}, {value}, NULL)"))
    return made.withColumn("key", F.expr("concat(kind, '-', key)"))


RANKS = [f"r{kind}" for kind in range(len(VALUES))]
IDS = [kind * PAIRS + number for kind, values in enumerate(VALUES) for number in range(2 * len(values) ** 2)]


def winners(spark: SparkSession) -> tuple[dict[str, set[int]], dict[str, int]]:
    """Return by key the ids of the rows that Spark ranks first, and the later one of them."""
    rows = ranked(spark.createDataFrame([(number,) for number in IDS], "id long"))
    order = ", ".join(f"{name} DESC" for name in RANKS)
    found = rows.selectExpr("key", "id", f"rank() OVER (PARTITION BY key ORDER BY {order}) AS place").where("place = 1")
    best: dict[str, set[int]] = {}
    for row in found.collect():
        best.setdefault(row["key"], set()).add(row["id"])
    return best, {key: max(ids) for key, ids in best.items()}


def test_the_row_that_spark_ranks_first_wins_in_every_target(
    spark: SparkSession,
    tmp_path: Path,
    elasticsearch: ElasticsearchService,
    postgres: PostgresService,
    fresh_index: FreshName,
) -> None:
    """NaN is the largest value, NULL the smallest, -0.0 equals 0.0; of equals the later row wins in Elasticsearch."""
    name = fresh_index()
    one: dict[str, Any] = {"key": "key", "order_by": RANKS, "select": ["key", "id"]}
    search = Elasticsearch(elasticsearch.url, index=name, create={"number_of_replicas": 0}, **one)
    table = Postgres(postgres.dsn, table=name, create=True, **one)
    stream = Stream(spark, tmp_path)
    stream.put(IDS)
    stream.run(stream.exactly_once({"search": search, "table": table}), ranked(stream.frame().select("id")))
    stream.end()
    best, latest = winners(spark)
    with closing(connect(search)) as client:
        client.indices.refresh(index=name)
        hits = client.search(index=name, size=len(IDS))["hits"]["hits"]
    assert {hit["_id"]: hit["_source"]["id"] for hit in hits} == latest
    with psycopg.connect(postgres.dsn) as connection:
        stored: dict[str, int] = dict(connection.execute(f"SELECT key, id FROM {name}").fetchall())  # noqa: S608 - a name of this test
    assert stored.keys() == best.keys()
    assert {key: number for key, number in stored.items() if number not in best[key]} == {}


def test_rows_of_a_key_are_folded_in_the_order_that_spark_gives_them(
    spark: SparkSession, tmp_path: Path, postgres: PostgresService, fresh_index: FreshName
) -> None:
    """Within an epoch by order_by, whatever order the rows arrive in; a constant will do where the order is equal."""
    ordered, counted = fresh_index(), fresh_index()
    columns: dict[str, Any] = {
        "key": "key",
        "select": ["id % 2 AS key", "concat(id, ' ') AS said", "1L AS times"],
        "create": True,
    }
    sinks: dict[str, Sink] = {
        "ordered": Postgres(
            postgres.dsn,
            table=ordered,
            order_by=["int(second(at))", "id"],
            accumulate={"said": "stored || new", "times": "sum"},
            **columns,
        ),
        "counted": Postgres(
            postgres.dsn,
            table=counted,
            order_by="0",
            accumulate={"said": "greatest(stored, new)", "times": "stored + new"},
            **columns,
        ),
    }
    stream = Stream(spark, tmp_path)
    # 61 has second 1: it comes after 1 and before 3
    stream.put([5, 61, 3, 1, 4, 2])
    stream.put([9, 7, 8])
    stream.run(stream.exactly_once(sinks))
    stream.end()
    with psycopg.connect(postgres.dsn) as connection:
        both = "SELECT key, said, times FROM {} ORDER BY key"
        assert connection.execute(both.format(ordered).encode()).fetchall() == [
            (0, "2 4 8 ", 3),
            (1, "1 61 3 5 7 9 ", 6),
        ]
        assert connection.execute(both.format(counted).encode()).fetchall() == [(0, "8 ", 3), (1, "9 ", 6)]


def test_values_without_an_order_are_refused_before_the_first_row(
    spark: SparkSession,
    tmp_path: Path,
    elasticsearch: ElasticsearchService,
    postgres: PostgresService,
    fresh_index: FreshName,
) -> None:
    name = fresh_index()
    stream = Stream(spark, tmp_path)
    stream.put([1, 2])
    for order_by in ("array(id)", "struct(id, word)", "map(id, word)"):
        options: dict[str, Any] = {"key": "id", "order_by": ["at", order_by], "create": True}
        sinks = Elasticsearch(elasticsearch.url, index=name, **options), Postgres(postgres.dsn, table=name, **options)
        for sink in sinks:
            with pytest.raises(ConfigurationError, match=r"invalid order_by=") as caught:
                stream.start(stream.exactly_once({"sink": sink}))
            assert order_by in str(caught.value)
            assert "order_by=['s.a', 's.b']" in caught.value.hint
    assert stream.ledger() == []
