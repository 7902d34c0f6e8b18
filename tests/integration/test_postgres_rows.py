"""What the sink stores, row for row: what PostgreSQL makes of the same values as text, and Spark's JDBC writer.

300 schemas of 35 rows are generated, and compared with both; the seed is in the failure's message.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import struct
import uuid
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.pandas.types import from_arrow_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from fix_postgres import MakeDriver, Truth
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import PostgresService

SCHEMAS, ROWS = 300, 35
JDBC_SCHEMAS: Final = 50
"""So many schemas go into one table of Spark's JDBC writer, each with columns of its own: a job each takes too long."""
ALPHABET: Final = "ab \t\n\r\\N\"'{},()%é\u00df\u4e2d\U0001f600\u200b\x01\x7f"
EPOCH: Final = dt.datetime.fromtimestamp(0, dt.UTC)
INSTANTS: Final = tuple(
    map(dt.datetime.fromisoformat, ("0001-01-01T00:00Z", "1900-02-28T23:59:59.999999Z", "9999-12-31T23:59:59.000001Z"))
)

Value = Any


@dataclass(frozen=True)
class Kind:
    """One pair of a column's type and the row's, with its values and their text in PostgreSQL."""

    column: str
    row: pa.DataType
    make: Callable[[random.Random], Value]
    text: Callable[[Value], str] = str
    direct: bool = True


def integer(bits: int) -> Callable[[random.Random], int]:
    ends = (-(2 ** (bits - 1)), -1, 0, 1, 2 ** (bits - 1) - 1)
    return lambda seed: seed.choice([*ends, seed.randint(ends[0], ends[-1])])


def double(seed: random.Random) -> float:
    ends = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308, 0.1)
    return seed.choice([*ends, seed.gauss(0, 1e6)])


def single(seed: random.Random) -> float:
    ends = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.401298464324817e-45, 3.4028234663852886e38)
    shortened: float = struct.unpack("f", struct.pack("f", seed.gauss(0, 1e6)))[0]
    return seed.choice([*ends, shortened])


def decimal(precision: int, scale: int) -> Callable[[random.Random], Decimal]:
    largest = 10**precision - 1
    ends = (0, 1, -1, largest, -largest)
    # by its text: arithmetic would round to 28 digits
    return lambda seed: Decimal(f"{seed.choice([*ends, seed.randint(-largest, largest)])}E-{scale}")


def string(longest: int) -> Callable[[random.Random], str]:
    return lambda seed: "".join(seed.choices(ALPHABET, k=seed.randint(0, longest)))


def day(seed: random.Random) -> dt.date:
    return dt.date.fromordinal(seed.choice([1, 719163, dt.date.max.toordinal(), seed.randint(1, 3652059)]))


def instant(seed: random.Random) -> dt.datetime:
    return seed.choice([*INSTANTS, EPOCH + dt.timedelta(microseconds=seed.randint(-(10**16), 10**16))])


def clock(seed: random.Random) -> dt.datetime:
    return instant(seed).replace(tzinfo=None)


def lapse(seed: random.Random) -> dt.timedelta:
    ends = (-dt.timedelta(days=10**8), -dt.timedelta(microseconds=1), dt.timedelta(0), dt.timedelta(days=10**8))
    return seed.choice([*ends, dt.timedelta(microseconds=seed.randint(-(10**16), 10**16))])


def array(one: Kind) -> Kind:
    def make(seed: random.Random) -> Value:
        return [one.make(seed) if seed.random() > 0.2 else None for _ in range(seed.choice([0, 1, 3]))]

    def text(values: Value) -> str:
        quoted = (
            "NULL" if value is None else '"' + one.text(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
            for value in values
        )
        return "{" + ",".join(quoted) + "}"

    return Kind(f"{one.column}[]", pa.list_(one.row), make, text, direct=one.direct)


def document(seed: random.Random) -> str:
    clean = string(5)(seed).replace("\x01", "")
    return json.dumps(seed.choice([None, 1.5, {"b": [1, clean], "a": None}, [], clean]))


PLAIN: Final = (
    Kind("smallint", pa.int16(), integer(16)),
    Kind("integer", pa.int32(), integer(32)),
    Kind("bigint", pa.int64(), integer(64)),
    Kind("real", pa.float32(), single, repr),
    Kind("double precision", pa.float64(), double, repr),
    Kind("numeric(38,18)", pa.decimal128(38, 18), decimal(38, 18), "{:f}".format),
    Kind("numeric(10,2)", pa.decimal128(10, 2), decimal(10, 2), "{:f}".format),
    Kind("boolean", pa.bool_(), lambda seed: seed.random() < 0.5),
    Kind("text", pa.string(), string(20)),
    Kind("bytea", pa.binary(), lambda seed: seed.randbytes(seed.choice([0, 1, 40])), lambda value: f"\\x{value.hex()}"),
    Kind("date", pa.date32(), day, dt.date.isoformat),
    Kind("timestamptz", pa.timestamp("us", "UTC"), instant, dt.datetime.isoformat),
    Kind("timestamp", pa.timestamp("us"), clock, dt.datetime.isoformat),
)
WIDENED: Final = (
    Kind("bigint", pa.int32(), integer(32)),
    Kind("numeric", pa.int64(), integer(64)),
    Kind("double precision", pa.int32(), integer(32)),
    Kind("double precision", pa.float32(), single, repr),
    Kind("numeric(20,4)", pa.decimal128(10, 2), decimal(10, 2), "{:f}".format),
    Kind("interval", pa.duration("us"), lapse, lambda value: f"{value // dt.timedelta(microseconds=1)} microseconds"),
    Kind("timestamp", pa.timestamp("us", "UTC"), instant, dt.datetime.isoformat),
)
PARSED: Final = (
    Kind("varchar(6)", pa.string(), string(6)),
    Kind("char(6)", pa.string(), string(6)),
    Kind('text COLLATE "C"', pa.string(), string(20)),
    Kind("uuid", pa.string(), lambda seed: str(uuid.UUID(int=seed.getrandbits(128)))),
    Kind("json", pa.string(), document),
    Kind("jsonb", pa.string(), document),
)
CAST: Final = (
    Kind("inet", pa.string(), lambda seed: seed.choice(["10.0.0.1", "::1", "192.168.0.0/24"]), direct=False),
    Kind("interval", pa.string(), lambda seed: seed.choice(["1 day -02:00:00.5", "-3 mons", "P1Y2M"]), direct=False),
    Kind("time", pa.string(), lambda seed: seed.choice(["00:00", "23:59:59.999999", "24:00"]), direct=False),
    Kind("int4range", pa.string(), lambda seed: seed.choice(["[1,5)", "empty", "(,7]"]), direct=False),
    Kind("bit(3)", pa.string(), lambda seed: seed.choice(["000", "101"]), direct=False),
    Kind("tsvector", pa.string(), lambda seed: seed.choice(["a:1 b:2", ""]), direct=False),
)
# instants and uuids in arrays are cast by the merge
ARRAYS: Final = tuple(
    replace(array(one), direct=one.direct and one.column not in {"timestamptz", "uuid"})
    for one in (*PLAIN, *PARSED[3:4], *CAST[:2])
)
OTHERS: Final = (*WIDENED, *PARSED, *CAST, *ARRAYS)
"""What Spark's JDBC writer does not write: it knows no uuid, json, interval or array of numeric."""


def generated(seed: random.Random) -> tuple[list[Kind], list[list[Value]]]:
    """Return some columns, at least one of them plain, and rows of them."""
    columns = [*seed.sample(PLAIN, seed.randint(1, 4)), *seed.sample(OTHERS, seed.randint(0, 4))]
    seed.shuffle(columns)
    return columns, [[one.make(seed) if seed.random() > 0.1 else None for one in columns] for _ in range(ROWS)]


def batch(columns: list[Kind], rows: list[list[Value]]) -> pa.RecordBatch:
    arrays = [pa.array(values, one.row) for one, values in zip(columns, zip(*rows, strict=True), strict=True)]
    return pa.record_batch(arrays, [f"c{place}" for place in range(len(columns))])


def make_tables(truth: Truth, columns: list[Kind], *tables: str) -> None:
    definitions = ", ".join(f"c{place} {one.column}" for place, one in enumerate(columns))
    for table in tables:
        truth.execute(f"CREATE TABLE {table} ({definitions})")


def store_as_text(dsn: str, table: str, columns: list[Kind], rows: list[list[Value]]) -> None:
    """Let PostgreSQL's own input functions read the rows."""
    statement = sql.SQL("COPY {} FROM STDIN").format(sql.Identifier(*table.split(".")))
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor().copy(statement) as copy:
        for row in rows:
            texts = [None if value is None else one.text(value) for one, value in zip(columns, row, strict=True)]
            copy.write_row(texts)


def differences(truth: Truth, *queries: str) -> list[tuple[Any, ...]]:
    """Return the rows of either query that the other lacks, as text."""
    one, other = queries
    query = "SELECT '{}', row FROM ({} EXCEPT ALL {}) AS x"
    return truth.execute(f"{query.format('ours', one, other)} UNION ALL {query.format('theirs', other, one)}")


def whole(table: str) -> str:
    return f"SELECT t::text AS row FROM {table} AS t"  # noqa: S608 - our own names


def some(table: str, columns: list[str]) -> str:
    return f"SELECT ROW({', '.join(columns)})::text AS row FROM {table}"  # noqa: S608 - our own names


Given = tuple[list[Kind], list[list[Value]]]


def plain(given: Given) -> list[int]:
    """Return the places of the columns that Spark's JDBC writer writes too."""
    return [place for place, one in enumerate(given[0]) if one in PLAIN]


def test_rows_of_generated_schemas_are_stored_as_postgres_reads_their_text_and_sparks_jdbc_writer_stores_them(
    postgres: PostgresService, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth, spark: SparkSession
) -> None:
    number = random.randrange(2**32)
    seed = random.Random(number)
    pg_truth.execute("SET TimeZone = 'UTC'")
    pg_truth.execute("SET synchronous_commit = off")
    ways: list[dict[str, Any]] = [{"commit": "prepared"}, {"commit": "staged"}, {"atomic": False}]
    schemas: list[Given] = []
    for schema in range(SCHEMAS):
        columns, rows = generated(seed)
        schemas.append((columns, rows))
        ours, theirs = f"{pg_schema}.ours_{schema}", f"{pg_schema}.theirs_{schema}"
        make_tables(pg_truth, columns, ours, theirs)
        way = seed.choice(ways if all(one.direct for one in columns) else ways[:2])
        sent = batch(columns, rows)
        driver = pg_driver(ours, sent, **way)
        cut = seed.randint(1, ROWS - 1)
        # slices, whose buffers begin elsewhere than their values
        driver.run(0, [sent.slice(0, cut), sent.slice(cut)])
        driver.close()
        store_as_text(pg_truth.dsn, theirs, columns, rows)
        found = differences(pg_truth, whole(ours), whole(theirs))
        assert found == [], (number, schema, way, columns)
    drawn = {f"{one.row} {one.column}" for columns, _ in schemas for one in columns}
    assert len(drawn) == len(PLAIN) + len(OTHERS), "not every type was drawn"

    for first in range(0, SCHEMAS, JDBC_SCHEMAS):
        together = range(first, first + JDBC_SCHEMAS)
        theirs = f"{pg_schema}.spark_{first}"
        store_by_spark(postgres, pg_truth, spark, theirs, {schema: schemas[schema] for schema in together})
        for schema in together:
            places = plain(schemas[schema])
            ours = some(f"{pg_schema}.ours_{schema}", [f"c{place}" for place in places])
            found = differences(pg_truth, ours, some(theirs, [f"s{schema}_c{place}" for place in places]))
            assert found == [], (number, schema, schemas[schema][0])


def store_by_spark(
    postgres: PostgresService, truth: Truth, spark: SparkSession, table: str, schemas: dict[int, Given]
) -> None:
    """Let Spark's JDBC writer store the plain columns of some schemas side by side."""
    names: list[str] = []
    arrays: list[pa.Array] = []
    definitions: list[str] = []
    for schema, (columns, rows) in schemas.items():
        for place in plain((columns, rows)):
            names.append(f"s{schema}_c{place}")
            arrays.append(pa.array([row[place] for row in rows], columns[place].row))
            definitions.append(f"{names[-1]} {columns[place].column}")
    truth.execute(f"CREATE TABLE {table} ({', '.join(definitions)})")
    sent = pa.record_batch(arrays, names)
    kinds = from_arrow_schema(sent.schema)
    frame = spark.createDataFrame([tuple(row.values()) for row in sent.to_pylist()], kinds)
    frame.write.jdbc(postgres.jdbc_url, table, mode="append", properties={"driver": postgres.jdbc_driver})
