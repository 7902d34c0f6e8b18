"""The doctor on real servers: what it says of a healthy one, what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from elasticsearch import Elasticsearch as Client
from kafka_kit import committing, epoch, identity, prepare, rows, sink_on_new_topic, task
from typer.testing import CliRunner

from epochsink import Elasticsearch, ExactlyOnce, Kafka, NewTopic, Postgres
from epochsink.cli.app import app
from epochsink.sink import participants_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName
    from pyspark.sql import SparkSession
    from typer.testing import Result

    from epochsink.sink import Finding, Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

MODULE = "a_pipeline"


def examined(sink: Sink) -> dict[str, Finding]:
    """Return the findings of a sink's participant by what they are about."""
    (participant,) = participants_of({"out": sink})
    with closing(participant):
        return {finding.what: finding for finding in participant.operator().examine("out")}


def alarms(found: dict[str, Finding]) -> list[Finding]:
    return [each for each in found.values() if each.hint or each.is_fatal]


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a verb of the command line where a module holds ``source``."""
    monkeypatch.chdir(tmp_path)

    def run(source: str, *arguments: str) -> Result:
        (tmp_path / f"{MODULE}.py").write_text(source)
        try:
            return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
        finally:
            sys.modules.pop(MODULE, None)

    return run


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    """Return an empty table with a column ``id``."""
    name = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {name} (id bigint)")
    return name


def test_a_table_gets_a_trial_epoch_and_keeps_nothing_of_it(
    postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY)")
    # a real epoch fires it; the doctor's does not
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.fired() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'fired'; END $$; CREATE TRIGGER t BEFORE INSERT ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {pg_schema}.fired()"
    )
    found = examined(Postgres(postgres.dsn, table=table, key="id", marker_schema=pg_schema))
    assert alarms(found) == []
    assert "prepared and rolled back" in found["trial epoch"].found
    assert f"PostgreSQL {postgres.version}"[:13] in found["server"].found
    assert [gid for gid in pg_truth.prepared() if "doctor" in gid] == []
    assert pg_truth.count(f"{pg_schema}.marker") == 0


def test_a_trial_epoch_that_could_not_be_rolled_back_is_named(
    monkeypatch: pytest.MonkeyPatch, postgres: PostgresService, table: str, pg_truth: Truth
) -> None:
    def cut(*_: object) -> None:
        raise psycopg.OperationalError("the connection was cut")

    monkeypatch.setattr("epochsink.postgres.examine.rollback_prepared", cut)
    found = examined(Postgres(postgres.dsn, table=table, marker_schema=table.partition(".")[0]))
    (gid,) = [name for name in pg_truth.prepared() if name.endswith(":doctor/trial")]
    assert found["trial epoch"].is_fatal
    assert f"epochsink orphans --dsn DSN --end '{gid}'" in found["trial epoch"].hint
    ended = CliRunner().invoke(app, ["orphans", "--dsn", postgres.dsn, "--end", gid, "--yes"])
    assert (ended.exit_code, pg_truth.prepared()) == (0, [])


def test_a_table_without_rights_or_without_a_key_is_named(
    postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint)")
    keyed = examined(Postgres(postgres.dsn, table=table, key="id", marker_schema=pg_schema))
    assert "is not a primary key or unique constraint" in keyed["table"].found
    assert keyed["table"].is_fatal
    role = f"reader_{pg_schema[-8:]}"
    pg_truth.execute(
        f"CREATE ROLE {role}; GRANT {role} TO current_user; GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {role}; "
        f"GRANT SELECT, INSERT, DELETE ON {pg_schema}.marker TO {role}; GRANT SELECT ON {table} TO {role}"
    )
    poor = Postgres(postgres.dsn, table=table, marker_schema=pg_schema, options={"options": f"-c role={role}"})
    found = examined(poor)
    assert found["trial epoch"].is_fatal
    assert f'GRANT INSERT ON "{pg_schema}"."orders"' in found["trial epoch"].hint


def test_a_server_that_prepares_nothing_is_told_from_one_that_should(pg_schema: str, postgres: PostgresService) -> None:
    missing = examined(Postgres(postgres.dsn, table=f"{pg_schema}.none", marker_schema=pg_schema))
    assert (missing["table"].is_fatal, missing["table"].hint) == (True, "create it, or set create=True")
    gone = examined(Postgres(postgres.dsn.replace(f":{postgres.port}", ":1"), table="orders"))
    assert "cannot connect" in gone["server"].found
    assert gone["server"].is_fatal


def test_a_topic_gets_a_trial_transaction(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = fresh_topic("examined")
    servers = kafka.bootstrap_servers
    absent = examined(Kafka(bootstrap_servers=servers, topic=topic, timeout=30))
    assert f"topic '{topic}' does not exist" in absent["cluster"].found
    found = examined(Kafka(bootstrap_servers=servers, topic=topic, create=NewTopic(partitions=1), timeout=30))
    assert alarms(found) == []
    assert "aborted" in found["trial transaction"].found
    # off by as long as it takes to begin a transaction
    assert re.match(r"that of the coordinator is [0-4]\.", found["clock"].found)
    assert "transaction.max.timeout.ms = 900 s" in found["settings"].found


def test_brokers_that_are_down_are_one_line(verb: Callable[..., Result]) -> None:
    """With what to do; no epoch has begun."""
    source = (
        "from epochsink import Kafka\nSINKS = {'out': Kafka(bootstrap_servers='127.0.0.1:1', topic='t', timeout=2)}\n"
    )
    result = verb(source, "doctor", f"{MODULE}:SINKS", "--json")
    (down,) = (line for line in json.loads(result.stdout)["lines"] if line["of"] == "sink 'out'")
    assert (result.exit_code, down["state"]) == (1, "wrong")
    assert "127.0.0.1:1" in down["found"]
    assert "Connection refused" in down["found"]
    assert "check that every executor can reach bootstrap_servers" in down["found"]
    assert "epoch" not in (down["found"] + down["hint"]).replace("epochsink", "")


def test_an_index_gets_a_trial_write(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> None:
    index = fresh_index()
    sink = Elasticsearch(elasticsearch.url, index=index, create=True)
    absent = examined(sink)
    assert (alarms(absent), absent["index"].found) == ([], f"{index} does not exist; the first start creates it")
    with closing(Client(elasticsearch.url)) as client:
        client.indices.create(index=index)
        found = examined(sink)
        assert alarms(found) == []
        assert "no document was written" in found["trial write"].found
        client.indices.refresh(index=index)
        assert client.count(index=index)["count"] == 0
        client.indices.put_settings(index=index, settings={"index.blocks.write": True})
    assert examined(sink)["cluster"].is_fatal


def test_with_the_stream_its_columns_and_the_executors_are_examined(
    spark: SparkSession, verb: Callable[..., Result], postgres: PostgresService, table: str, pg_truth: Truth
) -> None:
    pg_truth.execute(f"ALTER TABLE {table} RENAME id TO value")
    pg_truth.execute(f"ALTER TABLE {table} ADD timestamp timestamptz, ADD missing text NOT NULL")
    source = (
        "from epochsink import ExactlyOnce, Postgres\n"
        f"out = Postgres({postgres.dsn!r}, table={table!r}, marker_schema={table.partition('.')[0]!r})\n"
        "sink = ExactlyOnce(checkpoint='checkpoint', sinks={'table': out})\n"
        "def stream(spark):\n    return spark.readStream.format('rate').load()\n"
    )
    arguments = ("doctor", f"{MODULE}:sink", "--frame", f"{MODULE}:stream", "--json")
    result = verb(source, *arguments)
    told = {(line["of"], line["what"]): line for line in json.loads(result.stdout)["lines"]}
    assert told["executors", "Python"]["state"] == "well"
    assert "column 'missing'" in told["sink 'table'", "columns"]["found"]
    assert result.exit_code == 1
    pg_truth.execute(f"ALTER TABLE {table} DROP missing")
    assert verb(source, *arguments).exit_code == 0
    # the session that was there goes on
    assert spark.range(1).count() == 1


def test_a_look_before_the_first_start_makes_nothing_and_says_what_the_start_would_make(
    spark: SparkSession, verb: Callable[..., Result], postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    """The doctor, and `ExactlyOnce.check`."""
    options = f"table='{pg_schema}.new', create=True, marker_schema='{pg_schema}_m'"
    source = (
        "from epochsink import ExactlyOnce, Postgres\n"
        f"sink = ExactlyOnce(checkpoint='checkpoint', sinks={{'table': Postgres({postgres.dsn!r}, {options})}})\n"
        "def stream(spark):\n    return spark.readStream.format('rate').load()\n"
    )
    result = verb(source, "doctor", f"{MODULE}:sink", "--frame", f"{MODULE}:stream", "--json")
    assert result.exit_code == 0, result.output
    lines = json.loads(result.stdout)["lines"]
    said = [line["found"] for line in lines if (line["of"], line["what"]) == ("sink 'table'", "start")]
    assert [line.split('"')[0] for line in said] == [
        "would create schema ",
        "would create the table: CREATE TABLE IF NOT EXISTS ",
    ]

    sink = Postgres(postgres.dsn, table=f"{pg_schema}.new", create=True, marker_schema=f"{pg_schema}_m")
    once = ExactlyOnce(checkpoint="checkpoint", sinks={"table": sink})
    assert [f"would {each}" for each in once.check(spark.readStream.format("rate").load())] == said
    there = pg_truth.execute("SELECT to_regclass(%s), to_regnamespace(%s)", f"{pg_schema}.new", f"{pg_schema}_m")
    assert there == [(None, None)]


def test_status_tells_what_a_database_holds_since_when_and_what_it_blocks(
    verb: Callable[..., Result], tmp_path: Path, postgres: PostgresService, table: str
) -> None:
    schema = table.partition(".")[0]
    sink = Postgres(postgres.dsn, table=table, marker_schema=schema)
    (participant,) = participants_of({"table": sink})
    with closing(participant):
        assert participant.check("table", pa.schema([("id", pa.int64())])) == []
    source = (
        "from epochsink import Postgres\n"
        f"SINKS = {{'table': Postgres({postgres.dsn!r}, table={table!r}, marker_schema={schema!r})}}\n"
    )
    kit = CheckpointKit(tmp_path / "checkpoint", {"table": sink})
    kit.record(0, {"table": pa.record_batch({"id": pa.array([1], pa.int64())})})
    arguments = ("status", str(tmp_path / "checkpoint"), "--sinks", f"{MODULE}:SINKS")
    shown = " ".join(verb(source, *arguments).output.split())
    assert "table: epochsink:" in shown
    assert "prepared transaction of checkpoint/table, generation" in shown
    assert f"blocks {table} RowExclusiveLock" in shown
    (target,) = json.loads(verb(source, *arguments, "--json").stdout)["targets"]
    assert target["sinks"] == ["table"]
    assert ("prepared transaction", 0) in {(one["kind"], one["epoch"]) for one in target["pending"]}
    # a target that does not answer is said, and the rest of the status is there
    told = verb(source.replace(f":{postgres.port}", ":1"), *arguments)
    assert told.exit_code == 0
    assert "table: the target does not answer: " in told.output
    kit.decide(0)
    assert kit.coordinator.commit_decided()
    kit.close()
    assert "table: nothing is pending in the target" in verb(source, *arguments).output


def test_a_participant_tells_which_partitions_its_open_transactions_hold_back(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    config = sink_on_new_topic(kafka.bootstrap_servers, fresh_topic("held"))
    who = identity()
    with committing(config, who) as sink:
        prepare(config, task(who, epoch(3)), rows("a"))
        (held,) = sink.participant.operator().pending()
        assert (held.kind, held.holds) == ("open transaction", (f"{config.topic}-0",))
        assert sink.abort_orphans([]) != []
        assert list(sink.participant.operator().pending()) == []
