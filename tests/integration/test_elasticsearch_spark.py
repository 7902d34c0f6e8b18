"""The SQL in a real JVM: what Spark renders is what Elasticsearch stores."""

from __future__ import annotations

import json
import re
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from elasticsearch_rig import Rig

from epochsink import ExactlyOnce
from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.dead_letter import decoded
from epochsink.errors import ConfigurationError, RowsRejected
from epochsink.sink import Chosen
from epochsink.spark.query_plan import arrow_schema, one_pass

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa
    from fix_services import FreshName
    from pyspark.sql import DataFrame, SparkSession

    from epochsink_devkit.services import ElasticsearchService

HOSTILE = 'x"}}\n{"delete":{"_id":"y"}}\r\n\u2028\\ü\t\x00'
MOMENT = datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC)
DDL = (
    "id string, n bigint, amount decimal(20,3), at timestamp, local timestamp_ntz, day date, flag boolean, x double, "
    "raw binary, tags array<string>, inner struct<a: int, b: string>, counts map<string, bigint>, nothing string"
)
ROW = {
    "id": HOSTILE,
    "n": 2**62,
    "amount": Decimal("12345678901234567.890"),
    "at": MOMENT,
    "local": MOMENT.replace(tzinfo=None),
    "day": date(2026, 11, 21),
    "flag": True,
    "x": 1.5,
    "raw": b"\x00\xff",
    "tags": [HOSTILE, "b"],
    "inner": {"a": 1, "b": None},
    "counts": {"k": 3},
    "nothing": None,
}


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    """Return a session of its own beside that of all tests: the time zone must not matter."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    return session


@pytest.fixture
def sink(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> Elasticsearch:
    return Elasticsearch(elasticsearch.url, index=fresh_index(), key="id", create={"number_of_replicas": 0})


def changed(sink: Elasticsearch, **options: Any) -> Elasticsearch:
    return Elasticsearch(sink.hosts[0], **{"index": sink.index, "create": sink.index_settings, **options})


def rows(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    return spark.createDataFrame([tuple({**ROW, **row}.values()) for row in rows], DDL)


def rendered(frame: DataFrame, sink: Elasticsearch) -> Sequence[pa.RecordBatch]:
    """Return what the writer of ``sink`` gets of a frame."""
    selected = frame.selectExpr("*", f"struct({', '.join(sink.select)}) AS the_row")
    made = selected.selectExpr(*sink.columns("the_row", schema_of(frame, sink)))
    return list(made.toArrow().to_batches())


def schema_of(frame: DataFrame, sink: Elasticsearch) -> pa.Schema:
    return arrow_schema(frame.selectExpr(*sink.select).schema)


def test_every_type_and_hostile_text_is_stored_as_it_was(spark: SparkSession, sink: Elasticsearch) -> None:
    frame = rows(spark, {}, {"id": "plain"})
    with closing(Rig.joining(sink, schema_of(frame, sink))) as rig:
        rig.apply(0, rendered(frame, sink))
        stored = rig.stored()
    assert set(stored) == {HOSTILE, "plain"}
    document = stored[HOSTILE]
    assert document == {
        "id": HOSTILE,
        "n": 2**62,
        "amount": pytest.approx(12345678901234567.890),
        "flag": True,
        "x": 1.5,
        "at": "2026-11-21T10:00:00.123456Z",
        "local": "2026-11-21T10:00:00.123456",
        "day": "2026-11-21",
        "raw": "AP8=",
        "tags": [HOSTILE, "b"],
        "inner": {"a": 1, "b": None},
        "counts": {"k": 3},
        "nothing": None,
    }


def test_decimals_keep_every_digit(spark: SparkSession, sink: Elasticsearch) -> None:
    (batch,) = rendered(rows(spark, {}), sink)
    document = json.loads(batch["source"][0].as_py(), parse_float=Decimal)
    assert document["amount"] == ROW["amount"]


@pytest.mark.parametrize("kind", ["TINYINT", "SMALLINT", "INT", "BIGINT"])
def test_ids_of_whole_numbers_are_those_that_the_json_encoder_makes(
    spark: SparkSession, sink: Elasticsearch, kind: str
) -> None:
    """An expression goes by the encoder, a column does not; a NULL leaves the line without an ``_id`` by both."""
    frame = spark.createDataFrame([(0,), (-128,), (127,), (None,)], f"n {kind}").coalesce(1)
    by_column, by_expression = (
        [each.as_py() for batch in rendered(frame, changed(sink, key=key)) for each in batch["id"]]
        for key in ("n", "(n)")
    )
    assert by_column == by_expression == ['"_id":"0"}', '"_id":"-128"}', '"_id":"127"}', "}"]


def test_ids_of_several_columns_cannot_be_confused(spark: SparkSession, sink: Elasticsearch) -> None:
    several = changed(sink, key=["id", "inner.b"])
    pairs = [("a", "bc"), ("ab", "c"), ('a"', '"'), ("a,", "b")]
    frame = rows(spark, *({"id": first, "inner": {"a": 0, "b": second}} for first, second in pairs))
    with closing(Rig.joining(several, schema_of(frame, several))) as rig:
        rig.apply(0, rendered(frame, several))
        assert {tuple(json.loads(document_id)) for document_id in rig.stored()} == set(pairs)


@pytest.mark.parametrize("key", ["id", ["id", "n"]])
def test_a_null_id_is_refused_and_never_made_up(spark: SparkSession, sink: Elasticsearch, key: str | list[str]) -> None:
    keyed = changed(sink, key=key)
    frame = rows(spark, {}, {"id": None})
    with closing(Rig.joining(keyed, schema_of(frame, keyed))) as rig:
        with pytest.raises(RowsRejected, match="no _id: its key is NULL"):
            rig.prepare(0, rendered(frame, keyed))
        assert rig.stored() == {}


def test_a_null_id_is_refused_whatever_the_session_says_of_null_fields(
    spark: SparkSession, sink: Elasticsearch
) -> None:
    spark.conf.set("spark.sql.jsonGenerator.ignoreNullFields", "false")
    try:
        made = rendered(rows(spark, {"id": None}), sink)
    finally:
        spark.conf.unset("spark.sql.jsonGenerator.ignoreNullFields")
    with closing(Rig.joining(sink)) as rig, pytest.raises(RowsRejected, match="no _id"):
        rig.prepare(0, made)


@pytest.mark.parametrize("key", ["id", ["id", "n"]])
def test_ids_that_are_not_utf_8_do_not_fall_together(
    spark: SparkSession, sink: Elasticsearch, key: str | list[str]
) -> None:
    broken = changed(sink, key=key, select=["CAST(raw AS STRING) AS id", "n"])
    frame = rows(spark, {"raw": b"\xff"}, {"raw": b"\xfe"})
    with closing(Rig.joining(broken, schema_of(frame, broken))) as rig, pytest.raises(RowsRejected, match="UTF-8"):
        rig.prepare(0, rendered(frame, broken))


EXTREMES = [
    "double('NaN') AS x, float('Infinity') AS y",
    "double('-Infinity') AS x, float('NaN') AS y",
    "repeat('ü', 20000) AS text, map('k', repeat('ü', 20000)) AS labels",
    "timestamp'0001-01-01 00:00:00.000001' AS at, date'0001-01-01' AS day",
    "timestamp'9999-12-31 12:00:00.999999' AS at, timestamp_ntz'1969-12-31 23:59:59.999999' AS local",
    "date'9999-12-31' + interval 1 day AS day, timestamp'9999-12-31 12:00:00' + interval 1 day AS at",
    "map('', '1', 'a.b', '2', ' ', '3', '.', '4', 'a', '5') AS labels, map('n', map('m', 1.5D)) AS deep",
    "-99999999999999999999999999999999999.999BD AS big, 0.0000001BD AS small, 1E-7BD AS tiny, -9.99BD AS plain",
    "array(map('a', 1), map('a', null)) AS several, array(1.5D, double('NaN')) AS numbers",
    "null AS nothing, named_struct('a', null) AS inner, interval 1 day AS span",
    """parse_json('{"a": [1, {"b": null}], "": "x"}') AS anything, parse_json('7') AS seven""",
    """map('k', parse_json('[1]'), 'l', parse_json('{"a..b": 1}')) AS many""",
    "map(repeat('k', 19999), repeat('ü', 4096)) AS long",
    f"{'map(1, ' * 30}array(1){')' * 30} AS deep",
]


def test_an_index_that_we_make_takes_every_value_and_keeps_it(spark: SparkSession, sink: Elasticsearch) -> None:
    """All in one document: each column's type makes its field, each row its values."""
    expressions = ", ".join(
        re.sub(r" AS (\w+)", rf" AS \1_{number}", expression) for number, expression in enumerate(EXTREMES)
    )
    frame = spark.sql(f"SELECT 'x' AS id, {expressions}")
    with closing(Rig.joining(sink, schema_of(frame, sink))) as rig:
        (batch,) = made = rendered(frame, sink)
        rig.apply(0, made)
        assert rig.stored() == {"x": json.loads(batch["source"][0].as_py())}
    with closing(connect(sink)) as client:
        text = client.get(index=sink.index, id="x").body["_source"]
    assert (text["x_0"], text["y_0"], text["local_4"]) == ("NaN", "Infinity", "1969-12-31T23:59:59.999999")


UNFIT_MAPS = [
    "map('a', 1, concat('b', char(0)), 2)",
    "map('a', 1, repeat('k', 40000), 2)",
    "from_json('{\"a\": 1, \"a\": 2}', 'map<string, int>')",
    "map(CAST(unhex('ff') AS STRING), 1, CAST(unhex('fe') AS STRING), 2)",
    "array(map('a', 1), map(char(0), 1))",
    "map('a', map('b', map(char(0), 1)))",
    "named_struct('x', array(named_struct('y', map('c', array(map(char(0), 1))))))",
]


def test_maps_with_keys_that_no_index_takes_are_refused_by_the_task(spark: SparkSession, sink: Elasticsearch) -> None:
    """Else the server would refuse the document after the decision, and the query could not go on."""
    frame = spark.sql(f"SELECT 'x' AS id, {', '.join(f'{value} AS m{n}' for n, value in enumerate(UNFIT_MAPS))}")
    with closing(Rig.joining(sink, schema_of(frame, sink))) as rig:
        for number, _ in enumerate(UNFIT_MAPS):
            with pytest.raises(RowsRejected, match=rf"column 'm{number}': "):
                rig.prepare(number, rendered(frame.select("id", f"m{number}"), sink))


def test_rows_with_such_maps_become_letters_with_their_document(spark: SparkSession, sink: Elasticsearch) -> None:
    dead = changed(sink, key="id", on_rejected="dead_letter", dead_letter_index=f"{sink.index}-dead")
    columns = [f"{value} AS m{n}" for n, value in enumerate(UNFIT_MAPS)]
    frame = spark.sql(f"SELECT 'x' AS id, {', '.join(columns)}")
    with closing(Rig.joining(dead, schema_of(frame, dead))) as rig:
        for n, column in enumerate(columns):
            both = spark.sql(f"SELECT 'bad{n}' AS id, {column} UNION ALL SELECT 'good{n}', NULL")
            rig.apply(n, rendered(both, dead))
        assert sorted(rig.stored()) == [f"good{n}" for n in range(len(columns))]
        letters = {each["id"]: each for each in rig.stored(dead.dead_letter_index).values()}
        assert sorted(letters) == [f"bad{n}" for n in range(len(columns))]
        for n in range(len(columns)):
            source = letters[f"bad{n}"]["source"]
            assert json.loads(source)["id"] == f"bad{n}"
            assert f'"m{n}":' in source
        # to JSON, a text that is not UTF-8 is another one already: no letter is written as if it was the row
        assert rig.committer.participant.operator().letters("search").retry(Chosen()).kept == len(columns)


BROKEN = "CAST(unhex('61FF62') AS STRING)"
NO_VALUES = [
    (BROKEN, "invalid_text", "61FF62"),
    (f"array('x', null, {BROKEN})", "invalid_text", ""),
    (f"named_struct('it''s', named_struct('t', {BROKEN}))", "invalid_text", ""),
    (f"map('k', {BROKEN})", "invalid_text", ""),
    (f"map({BROKEN}, 'v')", "invalid_text", ""),
    (f"array(named_struct('b', X'FF', 'm', map({BROKEN}, 1)))", "invalid_text", ""),
    (f"map('k', array(named_struct('t', {BROKEN})))", "invalid_text", ""),
    (f"array(array(map('k', {BROKEN})))", "invalid_text", ""),
]
# later versions write "NaN"
NO_VARIANTS = [
    ("to_variant_object(named_struct('x', double('NaN')))", "invalid_variant", "NaN"),
    ("array(named_struct('v', to_variant_object(array(float('-Infinity')))))", "invalid_variant", "Infinity"),
]
NO_VALUES += NO_VARIANTS if pyspark.__version__.startswith("4.0.") else []


def test_values_that_json_would_change_are_refused_by_the_task_or_become_letters(
    spark: SparkSession, sink: Elasticsearch
) -> None:
    """Spark writes U+FFFD for bytes that are not UTF-8, and 4.0 NaN of a VARIANT so that no server reads it."""
    columns = [f"{value} AS c{n}" for n, (value, _, _) in enumerate(NO_VALUES)]
    frame = spark.sql(f"SELECT 'x' AS id, {', '.join(columns)}")
    with closing(Rig.joining(sink, schema_of(frame, sink))) as rig:
        for n, (_, error, shown) in enumerate(NO_VALUES):
            with pytest.raises(RowsRejected, match=rf"column 'c{n}': .*{shown}") as refused:
                rig.prepare(n, rendered(frame.select("id", f"c{n}"), sink))
            assert {"invalid_text": "not valid UTF-8", "invalid_variant": "NaN"}[error] in refused.value.message
    dead = changed(sink, key="id", on_rejected="dead_letter", dead_letter_index=f"{sink.index}-dead")
    with closing(Rig.joining(dead, schema_of(frame, dead))) as rig:
        for n, column in enumerate(columns):
            fine = "to_variant_object(array('NaN and Infinity'))" if "variant" in column else "NULL"
            fine = fine if "array" not in column else "NULL"
            rig.apply(n, rendered(spark.sql(f"SELECT 'bad' AS id, {column} UNION ALL SELECT 'ok{n}', {fine}"), dead))
        assert sorted(rig.stored()) == [f"ok{n}" for n in range(len(columns))]
        letters = sorted(rig.stored(dead.dead_letter_index).values(), key=lambda letter: letter["epoch"])
        assert [letter["error"] for letter in letters] == [error for _, error, _ in NO_VALUES]
        # the text itself is in the row, whose document has another one
        assert b"61FF62" in bytes(decoded(letters[0])["source"][0].as_buffer())
        assert rig.committer.participant.operator().letters("search").retry(Chosen()).kept == len(columns)


DECIMAL = "CAST('0.000000000000000000' AS DECIMAL(38, 18))"
SMALL = "CAST('-0.0000001' AS DECIMAL(38, 7))"
SMALL_TERMS = {
    "d": "0",
    "s.a": "-0.0000001",
    "l": "-0.0000001",
    "m.-0.0000001": "0.00000001",
    "named.k": "-0.0000001",
    "plain": "1.20",
    "short": 1e-8,
}


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_small_decimals_are_numbers_with_plain_digits(spark: SparkSession, sink: Elasticsearch, ansi: str) -> None:
    """Else a search for the number as text does not find it: the term is 0E-18."""
    made = changed(sink, key="id")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = spark.sql(
            f"SELECT 'x' AS id, {DECIMAL} AS d, named_struct('a', {SMALL}) AS s, array({SMALL}, NULL) AS l, "
            f"map({SMALL}, CAST(0.00000001 AS DECIMAL(9, 8))) AS m, map('k', {SMALL}) AS named, "
            "CAST(NULL AS STRUCT<a: DECIMAL(38, 18)>) AS n, "
            "CAST(1.20 AS DECIMAL(38, 2)) AS plain, CAST(0.00000001 AS DECIMAL(9, 8)) AS short"
        )
        with closing(Rig.joining(made, schema_of(frame, made))) as rig:
            (batch,) = documents = rendered(frame, made)
            assert batch["source"][0].as_py() == (
                '{"id":"x","d":0,"s":{"a":-0.0000001},"l":[-0.0000001,null],"m":{"-0.0000001":0.00000001},'
                '"named":{"k":-0.0000001},"n":null,"plain":1.20,"short":0.00000001}'
            )
            rig.apply(0, documents)
            assert rig.stored()["x"] == json.loads(batch["source"][0].as_py())
            with closing(connect(made)) as client:
                for name, term in SMALL_TERMS.items():
                    assert client.count(index=made.index, query={"term": {name: term}})["count"] == 1
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


def test_expressions_choose_rows_ids_deletes_and_the_newest(spark: SparkSession, sink: Elasticsearch) -> None:
    chosen = changed(
        sink, key="concat('order-', n)", select=["n", "upper(id) AS name"], delete_when="NOT flag", order_by="at"
    )
    later = MOMENT.replace(hour=11)
    frame = rows(
        spark,
        {"n": 1, "id": "new", "at": later},
        {"n": 1, "id": "old"},
        {"n": 2, "id": "kept", "flag": None},
        {"n": 3, "flag": False},
    )
    with closing(Rig.joining(chosen, schema_of(frame, chosen))) as rig:
        rig.apply(0, rendered(rows(spark, {"n": 3}), chosen))
        rig.apply(1, rendered(frame, chosen))
        assert rig.stored() == {"order-1": {"n": 1, "name": "NEW"}, "order-2": {"n": 2, "name": "KEPT"}}


def test_rows_without_a_key_are_rendered_without_one(spark: SparkSession, sink: Elasticsearch) -> None:
    keyless = changed(sink, select=["n"])
    frame = rows(spark, {"n": 1}, {"n": 2})
    with closing(Rig.joining(keyless, schema_of(frame, keyless))) as rig:
        rig.apply(0, rendered(frame, keyless))
        assert sorted(each["n"] for each in rig.stored().values()) == [1, 2]


def test_all_rows_of_a_key_are_brought_into_one_task(spark: SparkSession, sink: Elasticsearch) -> None:
    together = changed(
        sink, key="key", select=["concat('order-', n % 7) AS key", "n"], order_by="n", partition_by_key=True
    )
    frame = spark.range(0, 200, 1, 8).selectExpr("id AS n")
    schema = arrow_schema(frame.selectExpr(*together.select).schema)
    spread = one_pass({"search": together}, {"search": schema}).apply(frame)
    found = spread.selectExpr("id AS key", "spark_partition_id() AS task").distinct().collect()
    assert len({row["key"] for row in found}) == len(found) == 7


def test_a_field_that_no_document_can_have_is_named_before_an_index_is_made(
    spark: SparkSession, sink: Elasticsearch, tmp_path: Path
) -> None:
    bad = changed(sink, select=["value AS id", "1 AS `a..b`"])
    once = ExactlyOnce(checkpoint=str(tmp_path / "checkpoint"), sinks={"search": bad})
    with pytest.raises(ConfigurationError, match=re.escape("invalid field 'a..b'")):
        once.start(spark.readStream.format("rate").load().writeStream)
    with closing(connect(sink)) as client:
        assert not client.indices.exists(index=str(sink.index))
