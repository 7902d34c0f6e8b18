"""Rows given and documents stored, value for value: generated schemas, rendered in one Spark job for all of them."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import random
import string
import urllib.request
from contextlib import closing
from decimal import Context, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pytest
from elasticsearch_rig import Rig

from epochsink.elasticsearch import Elasticsearch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import ElasticsearchService

SCHEMAS, ROWS = 300, 34
DEEPEST: Final = 3
TEXT: Final = string.ascii_letters + " 0.\n\t\x00\"'\\/{}[]:,ßж語😀\u2028\x7f"
KEY: Final = TEXT.replace("\x00", "")
"""A field of type flattened takes no key with a NUL in it."""
YEAR_1, YEAR_9999 = dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30)  # noqa: DTZ001 - in UTC, as all of this
EXACT: Final = Context(prec=40)
MICROSECOND: Final = dt.timedelta(microseconds=1)


class Generator:
    """Makes types of columns, and values for them; ``chance`` decides everything."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def schema(self, number: int) -> pa.DataType:
        """Return the struct of one row; no other schema has fields of these names."""
        return pa.struct([(self._name(number, place), self._type(0)) for place in range(self._chance.randint(1, 7))])

    def rows(self, kind: pa.DataType) -> pa.Array:
        """Return rows of a schema: none of them NULL, each of their fields now and then."""
        return pa.array([{field.name: self._value(field.type) for field in kind.fields} for _ in range(ROWS)], kind)

    def _name(self, number: int, place: int) -> str:
        return self._chance.choice(["f{}_{}", "поле {} {}", '"{}`{}\\', "o{}.p.f{}", "{}$-{}"]).format(number, place)

    def _type(self, depth: int) -> pa.DataType:
        if depth < DEEPEST and self._chance.random() < 0.3:
            inner = self._type(depth + 1)
            several = [("a", inner), ("b c", self._type(depth + 1))]
            return self._chance.choice([pa.list_(inner), pa.struct(several), pa.map_(pa.string(), inner)])
        precision = self._chance.randint(1, 38)
        decimal = pa.decimal128(precision, self._chance.randint(0, precision))
        return self._chance.choice([*self._makers(), decimal, decimal])

    def _makers(self) -> dict[pa.DataType, Callable[[], Any]]:
        pick = self._chance
        return {
            pa.bool_(): lambda: pick.random() < 0.5,
            **{kind: partial(self._whole, kind.bit_width) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
            pa.float32(): lambda: float(np.float32(self._float(3e38))),
            pa.float64(): lambda: self._float(8e307),
            pa.string(): lambda: "".join(pick.choices(TEXT, k=pick.choice([0, 1, 9, 40, 400]))),
            pa.binary(): lambda: pick.randbytes(pick.choice([0, 1, 2, 3, 100])),
            pa.date32(): lambda: self._moment().date(),
            pa.timestamp("us", tz="UTC"): lambda: self._moment().replace(tzinfo=dt.UTC),
            pa.timestamp("us"): self._moment,
        }

    def _whole(self, bits: int) -> int:
        return self._chance.choice([-(1 << bits - 1), (1 << bits - 1) - 1, 0, self._chance.randrange(99)])

    def _float(self, largest: float) -> float:
        small = self._chance.choice([1.0, 1e-300, 1e-320])
        some = [self._chance.uniform(-largest, largest) * small, self._chance.random()]
        return self._chance.choice([*some, 0.1, 1e15, -0.0, math.nan, math.inf, -math.inf])

    def _moment(self) -> dt.datetime:
        recent = dt.datetime(2026, 11, 22, 6, 30)  # noqa: DTZ001 - as above
        any_time = YEAR_1 + self._chance.randrange((YEAR_9999 - YEAR_1) // MICROSECOND) * MICROSECOND
        return self._chance.choice([recent, any_time])

    def _value(self, kind: pa.DataType) -> Any:
        if self._chance.random() < 0.15:
            return None
        few = range(self._chance.randrange(4))
        if pa.types.is_list(kind):
            return [self._value(kind.value_type) for _ in few]
        if pa.types.is_struct(kind):
            return {field.name: self._value(field.type) for field in kind.fields}
        if pa.types.is_map(kind):
            keys = {"".join(self._chance.choices(KEY, k=self._chance.choice([0, 1, 9]))) for _ in few}
            return [(key, self._value(kind.item_type)) for key in sorted(keys)]
        if pa.types.is_decimal(kind):
            digits = self._chance.randrange(10 ** self._chance.randint(1, kind.precision))
            return Decimal(digits * self._chance.choice([1, -1])).scaleb(-kind.scale, EXACT)
        return self._makers()[kind]()


class Number(str):
    """The text of a number with a fraction or an exponent, as it stands in a document."""

    __slots__ = ()


def stored_as(value: Any, kind: pa.DataType) -> Any:
    """Return what a document holds of a value, by the rules of docs/reference/elasticsearch.md."""
    types = pa.types
    if value is None:
        return None
    if types.is_list(kind):
        return [stored_as(each, kind.value_type) for each in value]
    if types.is_struct(kind):
        return {field.name: stored_as(value[field.name], field.type) for field in kind.fields}
    if types.is_map(kind):
        return {key: stored_as(each, kind.item_type) for key, each in value}
    return number_as(value, kind) if types.is_floating(kind) else text_as(value, kind)


def number_as(value: float, kind: pa.DataType) -> Any:
    if math.isfinite(value):
        return np.float32(value) if kind == pa.float32() else value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def text_as(value: Any, kind: pa.DataType) -> Any:
    """Whole numbers, decimals, booleans and texts are kept as they are."""
    if pa.types.is_binary(kind):
        return base64.b64encode(value).decode()
    if pa.types.is_timestamp(kind):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value.isoformat() if pa.types.is_date(kind) else value


def read_as(found: Any, kind: pa.DataType) -> Any:
    """Return a value of a document as the type of its column takes it: numbers come with all their digits."""
    types = pa.types
    if types.is_list(kind) and found is not None:
        return [read_as(each, kind.value_type) for each in found]
    if types.is_struct(kind) and found is not None:
        assert list(found) == [field.name for field in kind.fields]
        return {field.name: read_as(found[field.name], field.type) for field in kind.fields}
    if types.is_map(kind) and found is not None:
        return {key: read_as(each, kind.item_type) for key, each in found.items()}
    if isinstance(found, (Number, int)) and not isinstance(found, bool) and types.is_floating(kind):
        return np.float32(found) if kind == pa.float32() else float(found)
    if isinstance(found, Number):
        whole, _, fraction = found.removeprefix("-").partition(".")
        assert whole.isdigit(), found
        assert fraction.isdigit(), found
        assert types.is_decimal(kind), found
        return Decimal(found)
    return found


def rendered(spark: SparkSession, sink: Elasticsearch, given: list[pa.Array]) -> list[pa.RecordBatch]:
    """Return what the writer gets of each schema's rows, with ids that name schema and row."""
    table = pa.table({f"s{number}": rows for number, rows in enumerate(given)})
    made = [
        f"({sink.columns(f's{number}', pa.schema(rows.type.fields))[-1].removesuffix(' AS source')}) AS s{number}"
        for number, rows in enumerate(given)
    ]
    documents = spark.createDataFrame(table).selectExpr(*made).toArrow()
    return [
        pa.record_batch(
            {
                "id": [f'"_id":"{number}/{row}"}}' for row in range(ROWS)],
                "source": documents[f"s{number}"].combine_chunks(),
            }
        )
        for number in range(len(given))
    ]


def documents(service: ElasticsearchService, index: str) -> dict[str, Any]:
    """Return every document as it is stored: the client would make floats of its numbers."""
    with urllib.request.urlopen(f"{service.url}/{index}/_search?size={SCHEMAS * ROWS + 1}") as answer:  # noqa: S310
        hits = json.load(answer, parse_float=Number)["hits"]["hits"]
    return {hit["_id"]: hit["_source"] for hit in hits}


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """Return a session that keeps columns without a time zone apart from those with one, and is far from UTC."""
    own = spark.newSession()
    own.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    own.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield own
    # it stays the thread's active session, whose settings decide how a schema is read
    own.conf.unset("spark.sql.timestampType")
    own.conf.unset("spark.sql.session.timeZone")


def test_generated_rows_are_stored_as_they_were_given(
    session: SparkSession, elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    """Each type in every nesting, extremes and NULLs; the index that we make refuses none of them."""
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - shown if the test fails
    generator = Generator(random.Random(seed))
    given = [generator.rows(generator.schema(number)) for number in range(SCHEMAS)]
    settings = {"number_of_replicas": 0, "mapping.total_fields.limit": 20_000, "max_result_window": 20_000}
    sink = Elasticsearch(elasticsearch.url, index=fresh_index(), create=settings, refresh=True)
    keyed = Elasticsearch(elasticsearch.url, index=sink.index, create=settings, refresh=True, key="id")
    everything = pa.schema([field for rows in given for field in rows.type.fields])
    with closing(Rig.joining(keyed, everything)) as rig:
        rig.apply(0, rendered(session, sink, given))
    found = documents(elasticsearch, sink.index)
    assert len(found) == SCHEMAS * ROWS
    for number, rows in enumerate(given):
        for place, row in enumerate(rows.to_pylist(maps_as_pydicts=None)):
            document = read_as(found[f"{number}/{place}"], rows.type)
            assert document == stored_as(row, rows.type), f"seed {seed}, schema {number}: {rows.type}"
