"""All three sinks hold every row once, with every value, though the pipeline is killed and started again."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import uuid
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import Elasticsearch

from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService
    from versions.environments import Environment

PIPELINE: Final = Path(__file__).with_name("pipeline.py")
CRASHES: Final = (
    "coordinator.record.after:2",  # the second epoch is recorded and not decided: the next run adopts it
    "coordinator.commit.between",  # decided; one sink has the epoch, another has not
    "",
)
ROWS_A_FILE: Final = 3
COLUMNS: Final = (
    "id bigint PRIMARY KEY, price numeric(20,6), at timestamptz, wall timestamp, day date, flag boolean, "
    "tiny smallint, small smallint, count integer, ratio real, exact double precision, word text, blob text, "
    "tags text[], seconds integer[], address jsonb, scores jsonb, bytes bytea, waited text"
)
# the hour that New York's clocks skip, which is the zone of the pipeline's session
AT: Final = dt.datetime(2024, 3, 10, 7, 30, 0, 123456, dt.UTC)
WALL: Final = dt.datetime(2024, 3, 10, 2, 30, 0, 123456)  # noqa: DTZ001 - has no zone
WORD: Final = 'é\t"\\\U0001f600'


def read_from_file(number: int) -> dict[str, Any]:
    """Return a row as the source has it."""
    return {
        "id": number,
        "price": "0.000086",
        "at": AT.isoformat(),
        "wall": WALL.isoformat(),
        "day": "2024-02-29",
        "flag": number % 2 == 0,
        "tiny": -(2**7),
        "small": -(2**15),
        "count": 2**31 - 1,
        "ratio": 1.5,
        "exact": 0.1,
        "word": WORD,
        "blob": "00FF",
        "tags": ["a", None, ""],
        "seconds": [1, None],
        "address": {"street": "x", "since": AT.isoformat(), "floors": [{"name": "g"}]},
        "scores": {"a": 0.5},
    }


def in_the_table(number: int) -> tuple[Any, ...]:
    """Return the same row as PostgreSQL should hold it, but for its nested columns."""
    exact = (number, Decimal("0.000086"), AT, WALL, dt.date(2024, 2, 29), number % 2 == 0)
    numbers = (-(2**7), -(2**15), 2**31 - 1, 1.5, 0.1)
    rest = (WORD, "00FF", ["a", None, ""], [1, None])
    return *exact, *numbers, *rest, b"\x00\xff", "INTERVAL '1 02:03:04.5' DAY TO SECOND"


def in_the_index(number: int) -> dict[str, Any]:
    """Return the same row as a document."""
    instant, wall = "2024-03-10T07:30:00.123456Z", "2024-03-10T02:30:00.123456"
    return {
        **read_from_file(number),
        "price": 0.000086,
        "at": instant,
        "wall": wall,
        "address": {"street": "x", "since": instant, "floors": [{"name": "g"}]},
        "bytes": "AP8=",
        "waited": "INTERVAL '1 02:03:04.5' DAY TO SECOND",
    }


def test_killed_restarted_and_adopted_every_row_is_there_once(
    environment: Environment,
    kafka: KafkaService,
    postgres: PostgresService,
    elasticsearch: ElasticsearchService,
    tmp_path: Path,
) -> None:
    name = f"everything_{uuid.uuid4().hex[:8]}"
    source, checkpoint = tmp_path / "input", tmp_path / "checkpoint"
    source.mkdir()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1)])[name].result(30)
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} ({COLUMNS})".encode())
    spec = {
        "name": name,
        "input": str(source),
        "checkpoint": str(checkpoint),
        "kafka": kafka.bootstrap_servers,
        "postgres": postgres.dsn,
        "elasticsearch": elasticsearch.url,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    put(source, 0)
    for number, point in enumerate(CRASHES, 1):
        put(source, number)
        armed = {"EPOCHSINK_FAILPOINT": point} if point else {}
        done = environment.run("python", PIPELINE, tmp_path / "spec.json", folder=tmp_path, **armed)
        assert done.returncode == (-signal.SIGKILL if point else 0), done.stdout[-2000:] + done.stderr[-8000:]

    count = ROWS_A_FILE * (len(CRASHES) + 1)
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("SET TIME ZONE 'UTC'")
        plain = ", ".join(column.split()[0] for column in COLUMNS.split(", ") if "jsonb" not in column)
        rows = connection.execute(f"SELECT {plain} FROM {name} ORDER BY id".encode()).fetchall()  # noqa: S608 - ours
        nested = connection.execute(f"SELECT address, scores FROM {name}".encode()).fetchall()  # noqa: S608 - ours
    assert rows == [in_the_table(number) for number in range(count)]
    assert all(scores == {"a": 0.5} and instant(address["since"]) == AT for address, scores in nested)

    with Elasticsearch(elasticsearch.url) as client:
        client.indices.refresh(index=name)
        hits = client.search(index=name, size=count + 1, sort="id")["hits"]["hits"]
    assert [hit["_source"] for hit in hits] == [in_the_index(number) for number in range(count)]

    values = [json.loads(value) for _, _, value in KafkaReader(kafka.bootstrap_servers, name)._records()]
    assert sorted(value["id"] for value in values) == list(range(count))
    assert all(instant(value["at"]) == AT and value["word"] == WORD for value in values)

    entries = [json.loads(path.read_text()) for path in sorted((checkpoint / "epochsink" / "ledger").glob("[0-9]*"))]
    prepared = [entry["epoch"] for entry in entries if entry["entry"] == "prepared"]
    # how many there are depends on the moment of the second kill: Spark may put two files into one epoch
    assert prepared == sorted(set(prepared)), "an adopted epoch is recorded once"
    assert len(prepared) > 2


def instant(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def put(folder: Path, number: int) -> None:
    """Add one file, which makes one epoch."""
    rows = [json.dumps(read_from_file(number * ROWS_A_FILE + each)) for each in range(ROWS_A_FILE)]
    draft = folder.with_name(f"draft-{number}.json")
    draft.write_text("\n".join(rows))
    # a source takes files in the order of their times
    os.utime(draft, (1_700_000_000 + number * 10,) * 2)
    draft.rename(folder / f"{number}.json")
