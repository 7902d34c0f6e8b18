"""What a sink writes is the same in every session: no setting of Spark's changes the SQL that the sinks add."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from elasticsearch import Elasticsearch as Client
from harness import make_topic
from kafka_kit import Reader
from streams import Stream
from value_cases import as_json, chosen, expression, shown, stored

from epochsink import Elasticsearch, Kafka, Postgres, PrepareFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

pytestmark = pytest.mark.connect

ZONE: Final = "America/New_York"
"""Of the sessions here: a timestamp that is taken for local time comes out five hours away."""
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "none": {},
    "escapes": {"spark.sql.parser.escapedStringLiterals": "true"},
    "no zone": {"spark.sql.timestampType": "TIMESTAMP_NTZ"},
    "names": {"spark.sql.parser.quotedRegexColumnNames": "true"},
    "not ANSI": {"spark.sql.ansi.enabled": "false"},
    "old dates": {"spark.sql.legacy.timeParserPolicy": "LEGACY"},
    "offset": {"spark.sql.session.timeZone": "GMT+8"},
    "others": {
        "spark.sql.ansi.doubleQuotedIdentifiers": "true",
        "spark.sql.ansi.enforceReservedKeywords": "true",
        "spark.sql.caseSensitive": "true",
        "spark.sql.function.concatBinaryAsString": "true",
        "spark.sql.jsonGenerator.ignoreNullFields": "false",
        "spark.sql.legacy.consecutiveStringLiterals.enabled": "true",
        "spark.sql.legacy.followThreeValuedLogicInArrayExists": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "true",
    },
}
AT: Final = "TIMESTAMP_LTZ'2026-01-02 03:04:05.000006Z'"
INNER: Final = f"named_struct('at', {AT}, 'wall', TIMESTAMP_NTZ'1500-01-02 03:04:05.000006', 'none', CAST(NULL AS INT))"
# the SQL of users, and theirs to write for their session: so it has nothing that the settings change
SELECT: Final = [
    "id",
    "CAST(X'615c62276322' AS STRING) AS word",
    f"{AT} AS at",
    "DATE'1500-01-02' AS day",
    "CAST(0 AS DECIMAL(38, 18)) AS exact",
    f"{INNER} AS nested",
    f"map('k 1', {INNER}) AS by_name",
    "id AS `a x`",
    "2 AS `a_x`",
    "named_struct('b', named_struct('k k', map('x', 1))) AS deep",
]
CASES: Final = chosen("c")
VALUES: Final = {name: expression(name, case) for name, case in CASES.items()}
NO_JSON: Final = {"c real"}
"""One of its values is an infinity."""
IN_JSON: Final = {name: case for name, case in CASES.items() if name not in NO_JSON}
NUMBERS: Final = [1, 2, 3]
"""Of the rows: two values of each type, and NULL."""
WORD: Final = "a\\b'c\""
INSTANT: Final = "2026-01-02T03:04:05.000006Z"
NESTED: Final = {"at": INSTANT, "wall": "1500-01-02T03:04:05.000006", "none": None}
DOCUMENT: Final = {
    "word": WORD,
    "at": INSTANT,
    "day": "1500-01-02",
    "exact": 0,
    "nested": NESTED,
    "by_name": {"k 1": NESTED},
    "a_x": 2,
    "deep": {"b": {"k k": {"x": 1}}},
}
ZERO: Final = "0.000000000000000000"


def document(number: int) -> dict[str, Any]:
    """Return a row as JSON."""
    values = {name: as_json([*case.values, None][NUMBERS.index(number)], case.data) for name, case in IN_JSON.items()}
    return {"id": number, **DOCUMENT, "a x": number, **values}


class Targets:
    """A topic, a table and an index, and a stream of some rows in a session that has settings."""

    def __init__(self, stream: Stream, name: str, kafka: str, postgres: str, elasticsearch: str) -> None:
        self.stream = stream
        self.name = name
        self.servers = kafka, postgres, elasticsearch
        # the rows say when they were: the broker would delete them as old
        make_topic(kafka, name, {"retention.ms": "-1"})
        stream.put(NUMBERS)
        # numbers that no type has which the index would choose for them
        with Client(elasticsearch) as client:
            client.indices.create(index=name, mappings={"dynamic": False})

    def write(self, **message: Any) -> None:
        """Write the rows to each of them; ``message`` are options of the topic."""
        kafka, postgres, elasticsearch = self.servers
        placed: Any = {"key": ["exact", "a x"], "routing": "exact"}
        select, in_json = [*SELECT, *VALUES.values()], [*SELECT, *(VALUES[name] for name in IN_JSON)]
        sinks: dict[str, Any] = {
            "topic": Kafka(bootstrap_servers=kafka, topic=self.name, key="exact", select=in_json, **message),
            "table": Postgres(postgres, table=self.name, key="id", select=select, create=True),
            "search": Elasticsearch(elasticsearch, index=self.name, select=in_json, **placed),
        }
        self.stream.run(self.stream.exactly_once(sinks))


@pytest.fixture(params=SETTINGS)
def targets(  # noqa: PLR0917 - fixtures
    request: pytest.FixtureRequest,
    spark: SparkSession,
    tmp_path: Path,
    kafka: KafkaService,
    postgres: PostgresService,
    elasticsearch: ElasticsearchService,
    fresh_topic: FreshName,
) -> Iterator[Targets]:
    """Yield the targets, and a session with one of the settings."""
    settings = {"spark.sql.session.timeZone": ZONE, **SETTINGS[request.param]}
    # Spark Connect has no second session beside this one
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    stream = Stream(spark, tmp_path)
    yield Targets(stream, fresh_topic("settings"), kafka.bootstrap_servers, postgres.dsn, elasticsearch.url)
    for name, earlier in before.items():
        if earlier is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, earlier)


# Spark Connect says of a setting that it will go
@pytest.mark.filterwarnings("ignore:The SQL config '.*' has been deprecated:UserWarning")
def test_the_same_values_are_in_every_target(targets: Targets) -> None:
    targets.write(
        timestamp=AT,
        partition="CAST(0 AS BIGINT)",
        headers="array(named_struct('key', 'k', 'value', X'00FF'))",
    )
    kafka, postgres, elasticsearch = targets.servers

    messages = sorted(Reader(kafka, targets.name).until(len(NUMBERS)), key=lambda one: json.loads(one.value())["id"])
    assert [json.loads(message.value()) for message in messages] == [document(number) for number in NUMBERS]
    for message in messages:
        assert (message.key(), message.headers()) == (ZERO.encode(), [("k", b"\x00\xff")])
        assert message.timestamp()[1] == 1_767_323_045_000

    with psycopg.connect(postgres) as connection:
        connection.execute("SET TIME ZONE 'UTC'")
        query = (
            f'SELECT word, at, day, exact::text, nested, by_name, a_x, deep, "a x" FROM "{targets.name}" ORDER BY id'  # noqa: S608 - ours
        )
        rows = connection.execute(query.encode()).fetchall()
        values = connection.execute(f'SELECT {shown(CASES)} FROM "{targets.name}" ORDER BY id'.encode()).fetchall()  # noqa: S608 - ours
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)
    row = (WORD, at, dt.date(1500, 1, 2), ZERO, NESTED, {"k 1": NESTED}, 2, DOCUMENT["deep"])
    assert rows == [(*row, number) for number in NUMBERS]
    assert values == stored(CASES)

    with Client(elasticsearch) as client:
        client.indices.refresh(index=targets.name)
        hits = sorted(client.search(index=targets.name)["hits"]["hits"], key=lambda hit: hit["_source"]["id"])
    assert [hit["_source"] for hit in hits] == [document(number) for number in NUMBERS]
    places = [(json.dumps([ZERO, str(number)], separators=(",", ":")), ZERO) for number in NUMBERS]
    assert [(hit["_id"], hit["_routing"]) for hit in hits] == places


@pytest.mark.parametrize("targets", ["none", "not ANSI"], indirect=True)
@pytest.mark.parametrize(
    "message", [{"partition": "3000000000L"}, {"partition": "concat('x', id)"}, {"timestamp": "concat('x', id)"}]
)
def test_a_value_that_is_out_of_range_is_refused_and_not_changed(targets: Targets, message: dict[str, str]) -> None:
    """A cast without ANSI makes partition -1294967296 of the first, and NULL of the others."""
    with pytest.raises(PrepareFailed, match=f"a value of {next(iter(message))}= is not of type"):
        targets.write(**message)
