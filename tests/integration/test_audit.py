"""`epochsink audit` against the real services: what a target has lost is named, and what cannot be compared is said."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from confluent_kafka import Producer
from elasticsearch_rig import keyless, rendered
from kafka import TopicPartition
from kafka_kit import admin, change_settings, create_topic, recreate_topic
from kafka_kit import rows as messages
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.elasticsearch import Elasticsearch
from epochsink.kafka import Kafka
from epochsink.kafka.audit import audit
from epochsink.kafka.cluster import Cluster
from epochsink.postgres import Postgres
from epochsink.sink import Receipt
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName
    from typer.testing import Result

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

MODULE = "audited_sinks"
LOADED = "CREATE TABLE {0}_copy AS TABLE {0}; TRUNCATE {0}; INSERT INTO {0} TABLE {0}_copy"


class Audited:
    """A checkpoint with one sink, whose epochs are done, and the verb."""

    def __init__(self, folder: Path, sink: Sink, like: pa.RecordBatch, named: str) -> None:
        with closing(OneSink.of(sink)) as committer:
            assert committer.check(like.schema) == []
        (folder / f"{MODULE}.py").write_text(f"{named}\n")
        self.kit = CheckpointKit(folder / "checkpoint", {"sink": sink})

    def write(self, number: int, rows: pa.RecordBatch) -> None:
        self.kit.run(number, {"sink": rows})

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["audit", str(self.kit.root), "--sinks", f"{MODULE}:SINKS", *arguments])

    def results(self, status: int) -> list[tuple[int, str, int | None]]:
        """Return epoch, result and number of rows found, after comparing the exit status."""
        answer = self.run("--json")
        assert answer.exit_code == status, answer.output
        (sink,) = json.loads(answer.stdout)["sinks"]
        assert (sink["marker"], sink["error"]) == ("", "")
        return [(each["epoch"], each["result"], each["found"]) for each in sink["epochs"]]


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Audited]]:
    monkeypatch.chdir(tmp_path)
    made: list[Audited] = []

    def make(sink: Sink, like: pa.RecordBatch, named: str) -> Audited:
        made.append(Audited(tmp_path, sink, like, named))
        return made[-1]

    yield make
    for each in made:
        each.kit.close()
    sys.modules.pop(MODULE, None)


def ids(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values, pa.int64())})


# ---- PostgreSQL


@pytest.fixture
def table(
    audited: Callable[..., Audited], postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> Callable[..., tuple[Audited, str]]:
    def make(named: str = "", **options: Any) -> tuple[Audited, str]:
        name = f"{pg_schema}.orders"
        pg_truth.execute(f"CREATE TABLE {name} (id bigint {'PRIMARY KEY' if 'key' in options else ''})")
        given = {"table": named or name, "marker_schema": pg_schema, **options}
        source = f"from epochsink import Postgres\nSINKS = {{'sink': Postgres({postgres.dsn!r}, **{given!r})}}"
        made = audited(Postgres(postgres.dsn, **given), ids(1), source)
        made.write(0, ids(1, 2))
        made.write(1, ids(3, 4, 5))
        return made, name

    return make


def test_rows_of_a_table_that_is_named_without_its_schema_are_counted(
    table: Callable[..., tuple[Audited, str]], pg_schema: str, pg_truth: Truth
) -> None:
    """It is found on the search path of the sink's own session, as the docs name tables."""
    made, name = table(named="orders", options={"options": f"-c search_path=nowhere,{pg_schema}"})
    assert made.results(0) == [(0, "agrees", 2), (1, "agrees", 3)]
    pg_truth.execute(f"DELETE FROM {name} WHERE id = 4")  # noqa: S608 - a name that the test made
    assert made.results(3) == [(0, "agrees", 2), (1, "differs", 2)]


@pytest.mark.parametrize("atomic", [True, False])
def test_rows_that_a_table_has_lost_are_found_by_their_epoch(
    table: Callable[..., tuple[Audited, str]], pg_truth: Truth, *, atomic: bool
) -> None:
    """Beside the rows of another program, which no audit counts."""
    made, name = table(atomic=atomic)
    insert, delete = "INSERT INTO {} VALUES (7), (8)", "DELETE FROM {} WHERE id = 4"
    pg_truth.execute(insert.format(name))
    assert made.results(0) == [(0, "agrees", 2), (1, "agrees", 3)]
    pg_truth.execute(delete.format(name))
    assert made.results(3) == [(0, "agrees", 2), (1, "differs", 2)]
    said = made.run().output
    assert "epoch 0, 2 row(s): agrees" in said
    assert "epoch 1, 3 row(s): differs: the target holds 2 row(s) in place of 3" in said


def test_of_a_table_with_a_key_the_markers_are_compared_and_the_rest_is_said(
    table: Callable[..., tuple[Audited, str]], pg_schema: str, pg_truth: Truth
) -> None:
    made, _ = table(key=["id"])
    assert made.results(0) == [(0, "not compared", None), (1, "not compared", None)]
    assert "later epochs replace rows of a key" in made.run().output
    forget = "DELETE FROM {}.marker WHERE epoch {}"
    pg_truth.execute(forget.format(pg_schema, "= 0"))
    assert made.results(3) == [(0, "differs", None), (1, "not compared", None)]
    pg_truth.execute(forget.format(pg_schema, ">= 0"))
    answer = made.run()
    assert answer.exit_code == 3
    assert "the ledger says that epoch 1 is done" in answer.output


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (f"{LOADED.format('{0}')};{LOADED.format('{1}.marker')}", "restored from a dump"),
        ("ALTER TABLE {0} ALTER id TYPE numeric; ALTER TABLE {0} ALTER id TYPE bigint", "ALTER TABLE"),
    ],
    ids=["as pg_restore does", "ALTER TABLE"],
)
def test_a_table_that_was_written_again_is_not_said_to_have_lost_rows(
    table: Callable[..., tuple[Audited, str]], pg_schema: str, pg_truth: Truth, rewrite: str, reason: str
) -> None:
    made, name = table()
    for statement in rewrite.format(name, pg_schema).split(";"):
        pg_truth.execute(statement)
    assert made.results(0) == [(0, "not compared", None), (1, "not compared", None)]
    assert reason in made.run().output


def test_a_target_that_does_not_answer_is_an_error_and_no_difference(
    table: Callable[..., tuple[Audited, str]], pg_truth: Truth
) -> None:
    made, name = table()
    pg_truth.execute(f"ALTER TABLE {name} RENAME TO elsewhere")
    answer = made.run()
    assert answer.exit_code == 1, answer.output
    assert "sink 'sink': " in answer.output
    assert "differs" not in answer.output


# ---- Kafka


@pytest.fixture
def topic(audited: Callable[..., Audited], kafka: KafkaService, fresh_topic: FreshName) -> tuple[Audited, str]:
    name = create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=2)
    options: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers, "topic": name, "timeout": 20}
    named = f"from epochsink import Kafka\nSINKS = {{'sink': Kafka(**{options!r})}}"
    made = audited(Kafka(**options), messages("a"), named)
    made.write(0, messages("a", "b", "c"))
    made.write(1, messages("d", "e"))
    return made, name


def test_the_records_of_each_transaction_are_counted(topic: tuple[Audited, str], kafka: KafkaService) -> None:
    made, name = topic
    assert made.results(0) == [(0, "agrees", 3), (1, "agrees", 2)]
    with admin(kafka.bootstrap_servers) as client:
        # up to the end of the log
        client.delete_records({TopicPartition(name, at): -1 for at in (0, 1)})
        assert made.results(0) == [(0, "not compared", None), (1, "not compared", None)]
        assert "retention has deleted" in made.run().output
    change_settings(kafka.bootstrap_servers, name, {"cleanup.policy": "compact"})
    assert made.results(0) == [(0, "not compared", None), (1, "not compared", None)]
    assert "cleanup.policy" in made.run().output


def test_a_topic_that_was_created_again_lacks_its_epochs(topic: tuple[Audited, str], kafka: KafkaService) -> None:
    made, name = topic
    recreate_topic(kafka.bootstrap_servers, name)
    answer = made.run()
    assert answer.exit_code == 3, answer.output
    assert "has no marker of this query any more" in answer.output


def test_a_transaction_without_its_commit_or_with_other_records_differs(
    topic: tuple[Audited, str], kafka: KafkaService
) -> None:
    made, _ = topic
    made.kit.record(2, {"sink": messages("f")})
    history = made.kit.history()
    undone, done = history.epochs[2].parts_of("sink"), history.epochs[1].parts_of("sink")
    cluster = Cluster(kafka.bootstrap_servers, {}, 20.0)
    with closing(cluster):
        (still_open,) = audit(cluster, [Receipt(2, 1, 0, 0, undone)])
        Producer(
            {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": undone[0]["transactional_id"]}
        ).init_transactions(30.0)
        aborted, known = audit(cluster, [Receipt(2, 1, 0, 0, undone), Receipt(1, 2, 0, 0, done)])
        (too_many,) = audit(cluster, [Receipt(1, 1, 0, 0, [{**done[0], "rows": 1}])])
    assert still_open.reason.endswith("has no commit of its transaction, but: nothing")
    assert aborted.reason.endswith("has no commit of its transaction, but: aborted")
    assert too_many.reason.startswith("the target holds 2 row(s) in place of 1")
    assert [each.result for each in (still_open, aborted, too_many, known)] == ["differs"] * 3 + ["agrees"]


# ---- Elasticsearch


def indexed(
    audited: Callable[..., Audited], service: ElasticsearchService, index: str, like: pa.RecordBatch, **options: Any
) -> Audited:
    given = {"index": index, "create": True, **options}
    named = f"from epochsink import Elasticsearch\nSINKS = {{'sink': Elasticsearch({service.url!r}, **{given!r})}}"
    return audited(Elasticsearch(service.url, **given), like, named)


def test_documents_without_a_key_are_counted_by_their_epoch(
    audited: Callable[..., Audited], elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    index = fresh_index()
    made = indexed(audited, elasticsearch, index, ids(1))
    made.write(0, keyless([{"n": 1}, {"n": 2}]))
    made.write(1, keyless([{"n": 3}, {"n": 4}, {"n": 5}]))
    assert made.results(0) == [(0, "agrees", 2), (1, "agrees", 3)]
    with closing(vendor.Elasticsearch(elasticsearch.url)) as client:
        (hit,) = client.search(index=index, query={"term": {"n": 2}})["hits"]["hits"]
        client.delete(index=index, id=hit["_id"])
    assert made.results(3) == [(0, "differs", 1), (1, "agrees", 3)]


@pytest.mark.parametrize("key", [None, "id"])
def test_dead_letters_that_were_written_again_are_no_difference(
    audited: Callable[..., Audited], elasticsearch: ElasticsearchService, fresh_index: FreshName, key: str | None
) -> None:
    index = fresh_index()
    dead = {"on_rejected": "dead_letter", "dead_letter_index": f"{index}_dead"}
    with closing(vendor.Elasticsearch(elasticsearch.url)) as client:
        client.indices.create(index=index, mappings={"dynamic": "strict", "properties": {"n": {"type": "long"}}})
        made = indexed(audited, elasticsearch, index, pa.record_batch({"n": pa.array([1])}), key=key, **dead)
        documents = [{"n": 1}, {"n": 2}, {"late": 3}, {"never": 4}]
        named = [(str(place), each) for place, each in enumerate(documents)]
        made.write(0, rendered(named) if key else keyless(documents))
        assert made.results(0) == [(0, "agrees", 2)]
        client.indices.put_mapping(index=index, properties={"late": {"type": "long"}})
        retry = ["letters", "retry", str(made.kit.root), "--sinks", f"{MODULE}:SINKS", "--all", "--yes"]
        assert CliRunner().invoke(app, retry).exit_code == 3
        assert made.results(0) == [(0, "agrees", 3)]
        assert "1 dead letter(s) were written again" in made.run().output
        for hit in client.search(index=index)["hits"]["hits"][1:]:
            client.delete(index=index, id=hit["_id"])
    assert made.results(3) == [(0, "differs", 1)]


def test_of_documents_with_a_key_those_of_the_newest_epoch_are_counted_by_their_version(
    audited: Callable[..., Audited], elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    index = fresh_index()
    made = indexed(audited, elasticsearch, index, pa.record_batch({"id": pa.array(["a"])}), key="id")
    made.write(0, rendered([("a", {"n": 1}), ("b", {"n": 2})]))
    # the later row of a key replaces the earlier one
    made.write(1, rendered([("b", {"n": 3}), ("c", {"n": 4}), ("c", {"n": 5})]))
    assert made.results(0) == [(0, "not compared", None), (1, "agrees", 2)]
    made.write(2, rendered([("a", None), ("d", {"n": 6})]))
    assert made.results(0) == [(epoch, "not compared", None) for epoch in (0, 1, 2)]
    assert "1 document(s) of it are there, of at most 2" in made.run().output
    made.write(3, rendered([("e", {"n": 7}), ("f", {"n": 8})]))
    with closing(vendor.Elasticsearch(elasticsearch.url)) as client:
        client.update(index=index, id="e", doc={"n": 9})
    assert made.results(3)[-1] == (3, "differs", 1)
