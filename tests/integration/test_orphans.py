"""What is left in a server is found and ended without its checkpoint, by names that people can read."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import Elasticsearch
from kafka_kit import committing, epoch, identity, prepare, rows, sink_on_new_topic, task
from typer.testing import CliRunner
from waiting import wait_until

from epochsink.cli.abandon import Abandonment
from epochsink.cli.app import app
from epochsink.cli.checkpoint_folder import open_place
from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.identity import marker_document
from epochsink.kafka import Kafka
from epochsink.postgres import Postgres
from epochsink.protocol import ledger
from epochsink.protocol.coordinator import Plan
from epochsink.sink import Epoch, Identity, RemnantState, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName
    from typer.testing import Result

    from epochsink.sink import Participant, Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

A_DAY = 24 * 3600 * 1000
"""In milliseconds."""


def orphans(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["orphans", *arguments], env={"COLUMNS": "300"})


def prepared_in(participant: Participant) -> list[str]:
    left = participant.remnants(([], []))
    return [each.name for each in left if each.state is not RemnantState.RUNNING]


def said(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_prepared_transaction_is_found_and_ended_without_its_checkpoint(
    tmp_path: Path, postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY)")
    sink = Postgres(postgres.dsn, table=table, key="id", marker_schema=pg_schema)
    row = pa.record_batch({"id": pa.array([1], pa.int64())})
    checker = OneSink.of(sink)
    assert checker.check(row.schema) == []
    checker.close()
    kit = CheckpointKit(tmp_path / "payments", {'ta"ble': sink})
    kit.record(0, {'ta"ble': row})
    [gid] = [part["gid"] for part in kit.history().epochs[0].parts_of('ta"ble')]
    assert gid.endswith(":all:payments/ta_ble")

    found = said(orphans("--dsn", postgres.dsn))
    for text in ("prepared transaction of payments/ta_ble", f"blocks {table} RowExclusiveLock", "staging table", gid):
        assert text in found
    assert "its driver is connected now" in found
    refused = orphans("--dsn", postgres.dsn, "--end", gid, "--yes")
    assert "belongs to a query whose driver is connected now" in said(refused)

    key = identity_key(kit.coordinator.identity('ta"ble'))
    kit.close()
    wait_until(lambda: pg_truth.sessions(key) == 0, "the driver's sessions have ended")
    shutil.rmtree(tmp_path / "payments")
    asked = orphans("--dsn", postgres.dsn, "--end", gid)
    assert (asked.exit_code, "if its checkpoint has recorded it, its rows are lost" in said(asked)) == (1, True)
    ended = orphans("--dsn", postgres.dsn, "--end", gid, "--yes")
    assert ended.exit_code == 0, ended.output
    assert pg_truth.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", gid) == []
    [staging] = [line for line in orphans("--dsn", postgres.dsn).output.splitlines() if line.startswith(pg_schema)]
    assert orphans("--dsn", postgres.dsn, "--end", staging.strip(), "--yes").exit_code == 0
    assert f"{pg_schema}." not in orphans("--dsn", postgres.dsn).output
    assert "epochsink has left nothing named" in said(orphans("--dsn", postgres.dsn, "--end", gid, "--yes"))


def test_an_open_transaction_is_found_and_ended_without_its_checkpoint(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    topic = fresh_topic()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(30)
    config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic)
    left = prepare(config, task(identity(), epoch(0)), rows("a", "b"))["transactional_id"]
    found = orphans("--bootstrap-servers", kafka.bootstrap_servers)
    assert found.exit_code == 0, found.output
    assert left in found.output
    assert f"{topic}-0" in found.output
    ended = orphans("--bootstrap-servers", kafka.bootstrap_servers, "--end", left, "--yes")
    assert ended.exit_code == 0, ended.output
    assert left not in orphans("--bootstrap-servers", kafka.bootstrap_servers).output


def kit_of_both(root: Path, kafka: KafkaService, topic: str, schema: str, truth: Truth) -> CheckpointKit:
    """Return a query that writes to a new topic and to a new table."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(30)
    truth.execute(f"CREATE TABLE {schema}.orders (id bigint PRIMARY KEY)")
    sinks: dict[str, Sink] = {
        "topic": Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic),
        "table": Postgres(truth.dsn, table=f"{schema}.orders", marker_schema=schema, commit="prepared"),
    }
    return CheckpointKit(root, sinks)


@pytest.mark.parametrize("clock", [0, -A_DAY], ids=["", "clock set back"])
def test_what_a_lost_ledger_has_left_is_ended_by_the_next_start(
    clock: int,
    tmp_path: Path,
    *,
    kafka: KafkaService,
    fresh_topic: FreshName,
    pg_schema: str,
    pg_truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left by a generation above the first: a ledger that began with 1 took it for a newer driver's, for ever."""
    kit = kit_of_both(tmp_path / "orders", kafka, fresh_topic(), pg_schema, pg_truth)
    kit.coordinator = kit.start()
    kit.record(0, {"topic": rows("a"), "table": pa.record_batch({"id": pa.array([1], pa.int64())})})
    topic_side, table_side = kit.participants
    assert prepared_in(topic_side)
    assert prepared_in(table_side)
    shutil.rmtree(kit.root / "epochsink")
    monkeypatch.setattr(ledger, "_clock", lambda: int(time.time() * 1000) + clock)
    kit.coordinator = kit.start()
    assert prepared_in(topic_side) == []
    assert prepared_in(table_side) == []
    kit.record(0, {"topic": rows("a"), "table": pa.record_batch({"id": pa.array([1], pa.int64())})})
    kit.decide(0)
    assert kit.coordinator.commit_decided()
    assert pg_truth.rows(f"{pg_schema}.orders") == [(1,)]
    kit.close()


def test_what_drivers_have_left_that_an_older_copy_of_the_ledger_does_not_know_is_ended_by_the_next_start(
    tmp_path: Path, kafka: KafkaService, fresh_topic: FreshName, pg_schema: str, pg_truth: Truth
) -> None:
    """Several have started since the copy, so to count takes would begin below them."""
    kit = kit_of_both(tmp_path / "orders", kafka, fresh_topic(), pg_schema, pg_truth)
    kit.coordinator = kit.start()
    shutil.copytree(kit.root, tmp_path / "copy")
    for _ in range(3):
        kit.coordinator = kit.start()
    written = {"topic": rows("a"), "table": pa.record_batch({"id": pa.array([1], pa.int64())})}
    kit.record(0, written)
    topic_side, table_side = kit.participants
    assert prepared_in(topic_side)
    assert prepared_in(table_side)
    shutil.rmtree(kit.root)
    shutil.copytree(tmp_path / "copy", kit.root)
    kit.coordinator = kit.start()
    assert prepared_in(topic_side) == []
    assert prepared_in(table_side) == []
    kit.record(0, written)
    kit.decide(0)
    assert kit.coordinator.commit_decided()
    assert pg_truth.rows(f"{pg_schema}.orders") == [(1,)]
    kit.close()


def test_elasticsearch_shows_who_has_written(elasticsearch: ElasticsearchService) -> None:
    who = Identity("5d9b9a9e-orphan", "search", 1, {"base": 2**30})
    with Elasticsearch(elasticsearch.url) as client:
        applied_epochs.ensure(ElasticsearchServer(client))
        applied = {"run": "r", "index": "orders", "index_uuid": "uuid"}
        applied_epochs.write(ElasticsearchServer(client), who, Epoch(7, "a" * 32), after=None, applied=applied)
        client.indices.refresh(index=applied_epochs.INDEX)
    found = said(orphans("--hosts", elasticsearch.url))
    assert "marker of /search, generation 0, epoch 7 age" in found
    assert "query 5d9b9a9e-orphan, index orders" in found


def test_a_marker_of_elasticsearch_is_not_ended(elasticsearch: ElasticsearchService) -> None:
    """It blocks nothing, and it is what keeps an older epoch from being applied again."""
    who = Identity("5d9b9a9e-stays", "search", 1, {"base": 2**30})
    with Elasticsearch(elasticsearch.url) as client:
        applied_epochs.ensure(ElasticsearchServer(client))
        applied = {"run": "r", "index": "orders", "index_uuid": "uuid", "history": ""}
        applied_epochs.write(ElasticsearchServer(client), who, Epoch(7, "a" * 32), after=None, applied=applied)
        client.indices.refresh(index=applied_epochs.INDEX)
        name = marker_document(identity_key(who))
        assert "must stay" in said(orphans("--hosts", elasticsearch.url))
        refused = orphans("--hosts", elasticsearch.url, "--end", name, "--yes")
        assert refused.exit_code == 1
        assert f"{name} must stay: it blocks nothing, and without it an older epoch" in said(refused)
        kept = applied_epochs.read(ElasticsearchServer(client), who)
    assert kept is not None
    assert kept.epoch == 7


@pytest.mark.parametrize(
    ("option", "address"),
    [
        ("--dsn", "postgresql://user:secret@127.0.0.1:{port}/shop?connect_timeout=2"),
        ("--bootstrap-servers", "127.0.0.1:{port}"),
        ("--hosts", "http://127.0.0.1:{port}"),
    ],
)
def test_a_server_that_is_unreachable_is_named_in_plain_lines(
    option: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epochsink.kafka.remnants._SECONDS", 2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = orphans(option, address.format(port=port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"127.0.0.1:{port}" in result.stderr or f"port={port}" in result.stderr
    assert "Hint: " in result.stderr
    assert not any(text in result.stderr for text in ("Traceback", "secret"))


@pytest.mark.parametrize(
    "arguments", [["--hosts", "localhost:9200"], ["--hosts", "http://localhost:1", "--options", "wrong"]]
)
def test_what_the_elasticsearch_client_refuses_is_told_in_plain_lines(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong").write_text("no_such_option = 1\n")
    result = orphans(*arguments)
    assert result.exit_code == 1
    assert "error: --hosts" in result.stderr
    assert "cannot be used" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--dsn", "host=x", "--hosts", "http://localhost"]])
def test_one_server_is_named(arguments: list[str]) -> None:
    assert "name one server to look in" in said(orphans(*arguments))


def test_a_clients_options_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# Kafka's own names\n\nsecurity.protocol = SSL\n")
    refused = orphans("--dsn", "host=x", "--options", str(file))
    assert "security.protocol" in said(refused)
    assert refused.exit_code == 1
    monkeypatch.setitem(sys.modules, "elasticsearch", None)
    assert 'pip install "epochsink[elasticsearch]"' in said(orphans("--hosts", "http://localhost"))


def test_what_a_query_prepares_in_kafka_after_it_was_abandoned_is_ended_by_the_query_itself(
    tmp_path: Path, kafka: KafkaService, fresh_topic: FreshName
) -> None:
    """Of a job that fails, nobody votes on the tasks that had ended: no reader may wait for those."""
    sink = sink_on_new_topic(kafka.bootstrap_servers, fresh_topic())
    kit = CheckpointKit(tmp_path / "checkpoint", {"topic": sink})
    kit.plan(0)
    assert kit.coordinator.settle(0) is Plan.WRITE
    with open_place(str(kit.root)) as place:
        Abandonment(place, sinks=kit.sinks, gone=[]).carry_out()
    attempt, _ = kit.write(0, {"topic": rows("late")})
    with committing(sink, kit.coordinator.identity("topic")) as other:
        assert len(other.leftovers()) == 1
        kit.coordinator.abandon(attempt)
        assert other.leftovers() == []
    kit.close()
