"""The one pass over an epoch's rows: `where=` and the like choose rows, and never what Spark executes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import pytest
from folder_sink import FolderSink
from pyspark.errors import StreamingQueryException
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import BooleanType
from streams import raising_after

from epochsink import Elasticsearch, Kafka
from epochsink.errors import ConfigurationError
from epochsink.sink import json_text
from epochsink.spark.query_plan import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from streams import Stream

    from epochsink.sink import Sink


def test_a_where_that_is_false_leaves_the_state_of_the_query_whole(stream: Stream) -> None:
    """Spark skips a plan below a filter that folds to false; the sums of later epochs would lack its rows."""

    def summed() -> DataFrame:
        return stream.frame().groupBy(F.expr("id % 2 AS id")).agg(F.sum("id").alias("total"))

    nobody = replace(stream.sink, where="1 = 0")
    for first in (0, 10):
        stream.put(range(first, first + 10))
    stream.run(stream.exactly_once({"folder": nobody}), summed(), mode="update")
    assert stream.sink.rows() == []
    stream.put(range(20, 30))
    stream.run(stream.exactly_once(), summed(), mode="update")
    assert {row["id"]: row["total"] for row in stream.sink.rows()} == {odd: sum(range(odd, 30, 2)) for odd in (0, 1)}


def test_a_where_of_chance_is_asked_once_a_row(stream: Stream) -> None:
    """Two sinks share out the rows by one draw each; asked twice, a row that passed once would be dropped."""
    stream.spark.udf.register("chance", F.udf(lambda: __import__("random").random(), "double").asNondeterministic())
    stream.put(range(4000))
    for name, where in {"sql": "rand() < 0.5", "python": "chance() < 0.5"}.items():
        sink = FolderSink(str(stream.folder / name), select=["id", "uuid() AS draw"], where=where)
        stream.checkpoint = stream.folder / f"checkpoint {name}"
        stream.run(stream.exactly_once({name: sink}))
        drawn = [row["draw"] for row in sink.rows()]
        assert len(set(drawn)) == len(drawn)
        # asked twice, a quarter passes; 0.5 is sixteen standard deviations away from both bounds
        assert 1500 < len(drawn) < 2500


def test_a_where_of_a_users_own_function_chooses_rows(stream: Stream) -> None:
    stream.spark.udf.register("is_small", lambda number: number < 5, BooleanType())
    stream.put(range(10))
    stream.run(stream.exactly_once({"folder": replace(stream.sink, where="is_small(id)")}))
    assert stream.sink.values() == list(range(5))


def test_a_key_of_chance_spreads_no_rows_over_tasks(stream: Stream) -> None:
    """Spark repeats a stage that it has lost: rows would then go to other tasks than before."""
    sinks: Any = {"good": stream.sink, "bad": replace(stream.sink, distribute_by=["id", "uuid()"])}
    with pytest.raises(ConfigurationError, match=r"sink 'bad' distributes rows .*: uuid\(\)") as refused:
        stream.run(stream.exactly_once(sinks))
    assert refused.value.hint


def test_nested_values_lose_nothing_as_json(spark: SparkSession) -> None:
    """By default Spark cuts instants to milliseconds, in the zone of the session, and leaves null fields out."""
    row = (
        "named_struct('at', TIMESTAMP'2026-11-21 10:00:00.123456Z', 'wall', TIMESTAMP_NTZ'2026-11-21 10:00:00.123456', "
        "'price', CAST('12345678901234567890.000000000000000001' AS DECIMAL(38,18)), 'note', CAST(NULL AS STRING), "
        "'lines', array(named_struct('since', TIMESTAMP'1969-07-20 20:17:40.000001Z', 'n', CAST(NULL AS INT))), "
        "'byDay', map('a', TIMESTAMP'2026-11-21 10:00:00.000001Z'))"
    )
    [(found,)] = spark.sql(f"SELECT {json_text(row)}").collect()
    assert json.loads(found, parse_float=Decimal) == {
        "at": "2026-11-21T10:00:00.123456Z",
        "wall": "2026-11-21T10:00:00.123456",
        "price": Decimal("12345678901234567890.000000000000000001"),
        "note": None,
        "lines": [{"since": "1969-07-20T20:17:40.000001Z", "n": None}],
        "byDay": {"a": "2026-11-21T10:00:00.000001Z"},
    }


@pytest.mark.parametrize("deleting", [{}, {"key": "id", "delete_when": "id < 0"}], ids=["rows", "deletes"])
@pytest.mark.parametrize("family", ["kafka", "elasticsearch"])
def test_json_is_rendered_once_a_row(spark: SparkSession, family: str, deleting: dict[str, Any]) -> None:
    """JSON in a branch would be rendered again for each use, and that is most of the work for a row."""
    sink: Sink = (
        Kafka(bootstrap_servers="b:1", topic="t", **deleting)
        if family == "kafka"
        else Elasticsearch("http://e:1", index="i", **deleting)
    )
    rows = spark.range(2).selectExpr("id", "CAST(id AS STRING) AS s")
    columns = sink.columns("row", arrow_schema(rows.schema))
    planned = cast("Any", rows.selectExpr("struct(*) AS row", "id").selectExpr(*columns))
    code = planned._sc._jvm.PythonSQLUtils.explainString(planned._jdf.queryExecution(), "codegen")
    assert code.count("StructsToJsonEvaluator) references") == 1


def test_what_the_users_function_observes_is_told_also_of_epochs_without_rows(stream: Stream) -> None:
    """``Observation.get`` waits for the end of an action, and would wait for ever where there is none."""
    once = stream.exactly_once()
    seen: list[int] = []

    def write(frame: DataFrame, epoch: int) -> None:
        observed = Observation()
        once(frame.observe(observed, F.count(F.lit(1)).alias("rows")).where("id >= 100"), epoch)
        waiting = threading.Thread(target=lambda: seen.append(observed.get["rows"]), daemon=True)
        waiting.start()
        waiting.join(20)

    for first in (0, 10, 100, 20, 30):
        stream.put(range(first, first + 10))
    writer = stream.frame().writeStream.foreachBatch(write).trigger(availableNow=True)
    writer.option("checkpointLocation", stream.url).start().awaitTermination()
    once.await_committed()
    assert seen == [10] * 5
    assert sorted(row["id"] for row in stream.sink.rows()) == list(range(100, 110))


def test_another_querys_clear_cache_changes_no_epoch(stream: Stream) -> None:
    """Nothing of an epoch is in Spark's cache, which belongs to everybody."""
    over = threading.Event()

    def clear() -> None:
        while not over.wait(0.01):
            stream.spark.catalog.clearCache()

    clearing = threading.Thread(target=clear, daemon=True)
    for first in (0, 10, 20, 100, 30):
        stream.put(range(first, first + 10))
    clearing.start()
    try:
        stream.run(frame=stream.frame().where("id >= 100"))
    finally:
        over.set()
        clearing.join()
    assert stream.sink.values() == list(range(100, 110))


def test_an_epoch_is_adopted_though_its_frame_has_intervals_of_a_calendar(stream: Stream) -> None:
    """Spark has a place that takes all rows, to run a plan for its state alone, and it takes no such column."""

    def frame() -> DataFrame:
        return stream.frame().selectExpr("id", "make_interval(0, 1) AS `a.b`", "array(make_interval(0, 1)) AS several")

    stream.put(range(10))
    sinks: dict[str, Sink] = {"folder": replace(stream.sink, select=["id"])}
    once = stream.exactly_once(sinks)
    writer = frame().writeStream.foreachBatch(raising_after(once, 0)).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException, match="Boom"):
        writer.option("checkpointLocation", stream.url).start().awaitTermination()
    once.await_committed()
    stream.put(range(10, 20))
    stream.run(stream.exactly_once(sinks), frame())
    assert sorted(row["id"] for row in stream.sink.rows()) == list(range(20))
