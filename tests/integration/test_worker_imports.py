"""What a Python worker imports to do its task: two packages that cost more than a second each stay out."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import subprocess
import sys
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING

import one_partition
import pyarrow as pa
from kafka_kit import create_topic

from epochsink.elasticsearch import Elasticsearch
from epochsink.kafka import Kafka
from epochsink.postgres import Postgres
from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, Keeping, WriterContext
from epochsink.spark.write_task import WriteJob, WriteOrder
from epochsink.testing.sink_rig import SinkRig

if TYPE_CHECKING:
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

MOMENT = dt.datetime(2026, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
TEXT = pa.string()


class Rig(SinkRig):
    """A sink with some rows that use all that it can take."""

    def __init__(self, sink: Sink, folder: Path, columns: dict[str, pa.Array]) -> None:
        super().__init__(sink, folder)
        self._rows = pa.record_batch(columns)

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return self._rows.take(pa.array(rows))


def imported_by(rig: Rig, tmp_path: Path) -> set[str]:
    """Prepare one partition in a process of its own; return the packages it imported."""
    epoch = Epoch(0, uuid.uuid4().hex)
    identity = rig.identity("query", 1)
    spool = Spool(str(tmp_path / "spool"))
    spool.make("query", epoch)
    job = WriteJob({"out": rig.sink}, {"out": identity}, spool)
    batch = rig.batch([0, 1, 2])
    order = tmp_path / "order"
    order.write_bytes(pickle.dumps((job, WriteOrder(epoch, {identity.sink: WriterContext(rig.keeping)}), [batch])))
    done = subprocess.run(
        [sys.executable, one_partition.__file__, str(order)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    (answer,) = told["answers"]
    committable = answer["committable"]
    written = committable["members"][identity.sink] if "members" in committable else committable
    assert (answer["sink"], answer["partition"], written["rows"]) == ("out", 0, 3)
    return set(told["imported"])


def test_a_task_into_kafka(tmp_path: Path, kafka: KafkaService, fresh_topic: FreshName) -> None:
    sink = Kafka(bootstrap_servers=kafka.bootstrap_servers, spool=True, timeout=20)
    header = pa.list_(pa.struct([("key", TEXT), ("value", pa.binary())]))
    topics = [create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=2) for _ in range(2)]
    rig = Rig(
        sink,
        tmp_path,
        {
            "topic": pa.array([topics[0], topics[1], topics[0]]),
            "key": pa.array(["a", None, "b"]),
            "value": pa.array(["1", "2", None]),
            "partition": pa.array([0, None, 1], pa.int32()),
            "timestamp": pa.array([MOMENT, None, MOMENT], pa.timestamp("us", "UTC")),
            "headers": pa.array([None, [], [{"key": "trace", "value": b"1"}]], header),
        },
    )
    imported = imported_by(rig, tmp_path)
    assert {"confluent_kafka", "pyarrow"} <= imported
    assert not imported & {"pandas", "elasticsearch"}


def test_a_task_into_postgres(tmp_path: Path, postgres: PostgresService, pg_truth: Truth, pg_schema: str) -> None:
    pg_truth.execute(
        f'CREATE TABLE "{pg_schema}".target (id bigint PRIMARY KEY, ref uuid, note text, amount numeric(9, 2))'
    )
    sink = Postgres(
        postgres.dsn,
        table=(pg_schema, "target"),
        key=["id"],
        atomic=False,
        marker_schema=pg_schema,
    )
    rig = Rig(
        sink,
        tmp_path,
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "ref": pa.array([str(uuid.uuid4()) for _ in range(3)]),
            "note": pa.array(["a", None, "c"]),
            "amount": pa.array([Decimal("1.25"), None, Decimal(3)], pa.decimal128(9, 2)),
        },
    )
    imported = imported_by(rig, tmp_path)
    assert {"psycopg", "pgpq"} <= imported
    assert not imported & {"pandas", "elasticsearch"}


def test_a_task_that_leaves_its_rows_for_postgres_to_the_spool(
    tmp_path: Path, postgres: PostgresService, pg_truth: Truth, pg_schema: str
) -> None:
    """The driver copies them: the task needs no client."""
    pg_truth.execute(f'CREATE TABLE "{pg_schema}".target (id bigint)')
    sink = Postgres(postgres.dsn, table=(pg_schema, "target"), marker_schema=pg_schema)
    rig = Rig(sink, tmp_path, {"id": pa.array([1, 2, 3], pa.int64())})
    rig.keeping = Keeping.IN_SPOOL_ALONE
    imported = imported_by(rig, tmp_path)
    assert "pyarrow" in imported
    assert not imported & {"psycopg", "pgpq", "pandas", "elasticsearch"}


def test_a_task_into_elasticsearch(tmp_path: Path, elasticsearch: ElasticsearchService, fresh_index: FreshName) -> None:
    sink = Elasticsearch(elasticsearch.url, index=fresh_index(), key="id")
    rig = Rig(
        sink,
        tmp_path,
        {"id": pa.array([f'"_id":"{n}"}}' for n in range(3)]), "source": pa.array(['{"n":1}', None, '{"n":3}'])},
    )
    imported = imported_by(rig, tmp_path)
    assert "pyarrow" in imported
    assert not imported & {"pandas", "elasticsearch", "elastic_transport"}
