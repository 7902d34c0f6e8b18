"""What the package uses of PySpark's private side is there, and is what it is taken for."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import LongType, StringType, StructField, StructType
from streams import DEADLINE
from waiting import wait_until

from epochsink.errors import UnsupportedQuery
from epochsink.sink.row_json import not_json
from epochsink.spark.classic import compat
from epochsink.spark.classic.engine import CLASSIC
from epochsink.spark.classic.stream_execution import StreamExecution
from epochsink.spark.connect.engine import CONNECT
from epochsink.spark.engine import WriterSettings
from epochsink.spark.engines import engine_of
from epochsink.spark.error_translation import INTERRUPTED
from epochsink.spark.placement import loose_columns, texts_as_times
from epochsink.spark.query_plan import arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from streams import Stream


def test_timestamps_have_an_arrow_type_at_every_depth(spark: SparkSession) -> None:
    """From 4.2 on a bare call dies here with an AssertionError."""
    frame = spark.sql(
        "SELECT now() AS at, array(now()) AS ats, struct(now() AS at) AS inner, TIMESTAMP_NTZ'2026-01-01' AS ntz"
    )
    in_utc = pa.timestamp("us", "UTC")
    schema = arrow_schema(frame.schema)
    assert [schema.field("at").type, schema.field("ntz").type] == [in_utc, pa.timestamp("us")]
    assert schema.field("ats").type.value_type == in_utc
    assert schema.field("inner").type.field("at").type == in_utc


@pytest.mark.parametrize("number", ["double('NaN')", "float('-Infinity')"])
def test_a_variant_without_a_number_becomes_json_or_is_found(spark: SparkSession, number: str) -> None:
    """Spark 4.0 writes NaN, which is no JSON; later versions write it as text."""
    frame = spark.sql(f"SELECT CAST(array({number}) AS VARIANT) AS v")
    condition = not_json("v", arrow_schema(frame.schema).field("v").type)
    assert condition is not None
    [(text, found)] = frame.selectExpr("to_json(struct(v))", condition).collect()
    assert found is spark.version.startswith("4.0."), text
    assert found or isinstance(json.loads(text)["v"][0], str)


def test_a_type_without_an_arrow_type_is_an_error_of_pyspark(spark: SparkSession) -> None:
    with pytest.raises(PySparkException):
        arrow_schema(spark.sql("SELECT INTERVAL 1 MONTH AS months").schema)


def test_the_jvm_behind_a_session(spark: SparkSession) -> None:
    jvm, java = compat.jvm_of(spark)
    assert str(java.version()) == spark.version
    assert int(jvm.java.lang.Math.max(1, 2)) == 2
    assert compat.gateway_of(spark).jvm is not None


def test_the_hadoop_configuration_has_the_sessions_own_settings(spark: SparkSession) -> None:
    """Those set after the start too: credentials of an object store often are."""
    spark.conf.set("fs.test.key", "value")
    try:
        assert str(compat.hadoop_configuration_of(spark).get("fs.test.key")) == "value"
    finally:
        spark.conf.unset("fs.test.key")


def test_the_byte_limit_is_the_one_that_is_set(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", "12345")
    try:
        assert compat.byte_limit_of_batches(spark) == 12345
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxBytesPerBatch")
    assert compat.byte_limit_of_batches(spark) > 12345


def test_which_queries_keep_state_and_what_in_it_does_not_repeat(spark: SparkSession) -> None:
    """Only what decides on the state counts, not what is computed after it, nor what is no stream."""
    rate = spark.readStream.format("rate").load()
    timed = rate.withWatermark("timestamp", "1 second")
    chance = F.udf(lambda: 0.5, "double").asNondeterministic()
    frames = {
        "rows alone": (rate.selectExpr("rand()"), False, 0),
        "an aggregation": (rate.groupBy("value").count().selectExpr("rand()"), True, 0),
        "of chance": (rate.selectExpr("value", "rand() + 1 AS x").groupBy("value").sum("x"), True, 1),
        "the moment of the batch": (rate.select(F.current_timestamp().alias("t")).groupBy("t").count(), True, 0),
        "duplicates": (rate.select("value", chance().alias("x")).dropDuplicates(["value"]), True, 1),
        "distinct rows": (rate.distinct(), True, 0),
        "a limit": (rate.limit(3), True, 0),
        "two streams": (
            timed.join(timed.selectExpr("value AS other", "timestamp AS at"), F.expr("value = other")),
            True,
            0,
        ),
        "a stream and a table": (rate.join(spark.range(3).groupBy("id").count(), F.expr("id = value")), False, 0),
        "a function's own state": (
            rate.groupBy("value").applyInPandasWithState(lambda *_: iter([]), "a int", "a int", "append", "NoTimeout"),
            True,
            0,
        ),
    }
    for name, (frame, keeps, unrepeatable) in frames.items():
        untyped: Any = frame
        plan = untyped._jdf.queryExecution().analyzed()
        assert compat.has_state(plan) is keeps, name
        assert len(compat.unrepeatable_state(plan)) == unrepeatable, name


def test_the_frame_of_a_writer(stream: Stream) -> None:
    frame = stream.frame()
    assert compat.frame_of(frame.writeStream) is frame


def test_what_is_set_on_a_writer(stream: Stream) -> None:
    writer = stream.frame().writeStream
    assert compat.settings_of(writer) == WriterSettings("parquet", "Append", None)
    writer = writer.foreachBatch(print).outputMode("complete").option("CHECKPOINTlocation", "/there")
    assert compat.settings_of(writer) == WriterSettings("foreachBatch", "Complete", "/there")


@pytest.mark.parametrize(
    ("expression", "key", "loose"),
    [
        ("id", ["id"], []),
        ("`id`", ["id"], []),
        ("concat('a', id % 7)", ["id"], []),
        ("date_format(day, 'yyyy.MM')", ["id", "date_format(day, 'yyyy.MM')"], []),
        ("concat('a', upper(name))", ["upper(name)"], []),
        ("array_join(transform(split(name, ''), x -> upper(x)), '')", ["name"], []),
        ("concat(id, name)", ["id"], ["name"]),
        ("name", ["upper(name)"], ["name"]),
        ("s.a", ["s.b"], ["s"]),
        ("s.a", ["s"], ["s"]),
    ],
)
def test_the_columns_on_which_an_expression_depends_besides_the_key(
    spark: SparkSession, expression: str, key: list[str], loose: list[str]
) -> None:
    frame = spark.sql("SELECT 1L AS id, 'n' AS name, DATE'2026-11-01' AS day, named_struct('a', 1, 'b', 2) AS s")
    assert loose_columns(frame, expression, key) == loose


TIMED = (
    "SELECT 1L AS id, 'n' AS name, DATE'2026-11-01' AS day, TIMESTAMP'2026-11-01 00:00:00' AS instant, "
    "named_struct('a', 'n') AS s"
)


@pytest.mark.parametrize(
    "expression",
    [
        "concat('orders-', date_format(day, 'yyyy.MM'))",
        "name || day",
        "concat(name, day, 'a' || 'b')",
        "CAST(name AS DATE)",
        "date_trunc('month', CAST(substr(s.a, 1, 10) AS DATE))",
        "year(substr(name, 1, 10))",
        "to_date(name, 'yyyyMMdd')",
        "date_format(to_timestamp(name || '0', 'yyyyMMddHHmm'), 'HH:mm')",
        "array_join(transform(split(name, ''), x -> CAST(x AS DATE)), '')",
        "day > name",
        "pmod(hash(name, instant), 8)",
        "CAST(id AS TIMESTAMP)::DATE + INTERVAL '1' DAY",
        "date_add(day, 1) < DATE '2026-11-01'",
        "from_json(name, 'a INT').a",
        "CASE WHEN year(day) > 2020 THEN name ELSE 'x' || name END",
    ],
)
def test_what_becomes_a_time_by_itself_is_settled(spark: SparkSession, expression: str) -> None:
    assert texts_as_times(spark.sql(TIMED), expression) == []


@pytest.mark.parametrize(
    ("expression", "texts"),
    [
        ("CAST('to' || 'day' AS DATE)", ["'to' || 'day'"]),
        ("('to' || 'day')::date", ["('to' || 'day')"]),
        ("to_date(concat('to', 'day'))", ["concat('to', 'day')"]),
        ("CAST(CAST(concat('no', 'w') AS STRING) AS TIMESTAMP_NTZ)", ["CAST(concat('no', 'w') AS STRING)"]),
        ("year(repeat('today', 1))", ["repeat('today', 1)"]),
        ("day < 'to' || 'day'", ["'to' || 'day'"]),
        ("nvl(day, lower('TODAY'))", ["lower('TODAY')"]),
        ("name = 'x' AND CAST(name AS TIMESTAMP) > instant", ["name"]),
        ("date_format(`name`, 'yyyy')", ["`name`"]),
        ("date_trunc('day', s.a)", ["s.a"]),
        ("if(id > 1, instant, name)", ["name"]),
        ("instant = name", ["name"]),
        ("to_timestamp(name)", ["name"]),
        ("CAST('12:30' AS TIMESTAMP)", ["'12:30'"]),
        ("hour('T12')", ["'T12'"]),
        ("CAST(array(name) AS ARRAY<TIMESTAMP>)", ["array(name)"]),
        ("transform(split(name, ''), x -> CAST(x AS TIMESTAMP))", ["x"]),
        ("from_json(name, 'a TIMESTAMP').a", ["name"]),
        ("from_csv('12:30', 'a timestamp')", ["'12:30'"]),
        ("CAST(parse_json(name) AS TIMESTAMP)", ["parse_json(name)"]),
    ],
)
def test_a_text_that_may_become_a_time_of_the_clock_is_not(
    spark: SparkSession, expression: str, texts: list[str]
) -> None:
    """Spark folds a text without a column, and takes a time alone for one of today: the value changes every day."""
    frame = spark.sql(TIMED)
    # Spark accepts it
    assert frame.select(F.expr(expression)).columns
    assert texts_as_times(frame, expression) == texts


def test_which_expressions_may_change(stream: Stream) -> None:
    stream.spark.udf.register("fixed", lambda: 1)
    stream.spark.udf.register("loose", F.udf(lambda: 1).asNondeterministic())
    asked = ["id + 1", "rand()", "now()", "upper(uuid())", "fixed()", "loose()", "monotonically_increasing_id()"]
    assert compat.changeable(stream.frame(), asked) == [
        "rand()",
        "upper(uuid())",
        "loose()",
        "monotonically_increasing_id()",
    ]
    assert compat.changeable(stream.frame(), []) == []


def test_sql_and_a_function_made_once_serve_frames_of_other_queries(spark: SparkSession) -> None:
    answer = StructType([StructField("most", LongType())])

    def largest(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            most = max(row["n"] for row in batch.column("it").to_pylist())
            yield pa.RecordBatch.from_pydict({"most": pa.array([most])})

    columns = compat.columns_of(["*", "struct(id AS n\n, 'a' AS text) AS it"])
    function = compat.arrow_function(largest, answer)
    for rows in (3, 7):
        frame = spark.range(0, rows, 1, 1)
        selected = compat.select(frame, columns)
        assert selected.columns == ["id", "it"]
        assert [row["most"] for row in compat.map_in_arrow(selected.select("it"), function).collect()] == [rows - 1]
    assert compat.schema_text(spark.range(1)) == compat.schema_text(spark.range(2)) != compat.schema_text(selected)


def test_each_kind_of_session_has_its_engine(spark: SparkSession) -> None:
    assert engine_of(spark) is CLASSIC
    other: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    assert engine_of(other) is CONNECT


def test_a_query_and_its_stream_thread_see_one_execution(stream: Stream, spark: SparkSession) -> None:
    """From outside by the query's handle, from inside by the local properties of the thread."""
    seen: dict[str, Any] = {}

    def look(frame: DataFrame, _epoch: int) -> None:
        inside = StreamExecution.of_batch(frame.sparkSession, None)
        seen["ids"] = inside.query_id, inside.run_id
        seen["known"] = StreamExecution.of_batch(frame.sparkSession, inside) is inside
        seen["batch"] = inside.batch(0)

    stream.put(range(3))
    query = stream.by_hand(look, endless=True)
    execution = StreamExecution.of_query(query)
    query.processAllAvailable()
    assert seen == {"ids": (query.id, query.runId), "known": True, "batch": 0}
    assert execution.checkpoint().endswith(str(stream.checkpoint))
    execution.refuse_unlike("there", "there")
    assert execution.output_mode() == "Append"
    assert not execution.has_state()
    assert execution.unrepeatable_state() == []
    assert execution.is_alive()
    query.stop()
    assert not execution.is_alive()
    assert execution.batch(0) is None
    with pytest.raises(UnsupportedQuery, match="outside the foreachBatch"):
        StreamExecution.of_batch(spark, execution)


def test_spark_takes_these_words_for_its_own_stop(stream: Stream) -> None:
    """A query that fails so while it is being stopped has not failed."""
    in_batch, made = threading.Event(), threading.Event()
    queries: list[StreamingQuery] = []

    def fail_at_stop(_frame: DataFrame, _epoch: int) -> None:
        in_batch.set()
        assert made.wait(DEADLINE)
        wait_until(lambda: not StreamExecution.of_query(queries[0]).is_active(), "the query is being stopped")
        raise RuntimeError(INTERRUPTED)

    stream.put(range(3))
    queries.append(stream.by_hand(fail_at_stop, endless=True))
    made.set()
    assert in_batch.wait(DEADLINE)
    queries[0].stop()
    assert queries[0].exception() is None


def test_other_words_are_a_failure(stream: Stream) -> None:
    def fail(_frame: DataFrame, _epoch: int) -> None:
        raise RuntimeError("broken")

    stream.put(range(3))
    with pytest.raises(StreamingQueryException, match="broken"):
        stream.by_hand(fail).awaitTermination(60)


def test_a_function_gets_columns_whose_names_sql_would_take_for_something_else(spark: SparkSession) -> None:
    def names(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"names": pa.array([" ".join(batch.schema.names)])})

    frame = spark.range(0, 1, 1, 1).selectExpr("id AS `a.b`", "id AS n", "id AS N", "id AS `x``y`")
    function = compat.arrow_function(names, StructType([StructField("names", StringType())]))
    assert [row["names"] for row in compat.map_in_arrow(frame, function).collect()] == ["a.b n N x`y"]
