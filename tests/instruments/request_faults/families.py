"""What the runner must know of each kind of sink: its rows, a fresh target, its readers, and what others do to it."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import kafka_kit
import psycopg
import pyarrow as pa
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from elasticsearch import Elasticsearch as Client
from elasticsearch import NotFoundError
from kafka.admin import AbortTransactionSpec, ConfigResource
from kafka.errors import TransactionCoordinatorFencedError
from kafka.protocol.consumer.offsets import IsolationLevel, OffsetSpec
from kafka.structs import TopicPartition
from psycopg import sql

# the committers and writers, too: a driver is forked from a process that has imported this
import epochsink.elasticsearch.committer
import epochsink.elasticsearch.writer
import epochsink.kafka.committer
import epochsink.kafka.writer
import epochsink.postgres.committer
import epochsink.postgres.writer  # noqa: F401
from epochsink import Elasticsearch, Kafka, Postgres
from epochsink.identity import PREFIX, staging_owner
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader
from epochsink_devkit.history.readers.reader import nothing
from epochsink_devkit.history.rows import SCHEMA
from request_faults import framings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from epochsink.sink import Sink
    from epochsink_devkit.history.readers import TargetReader


LOST: Final = "what is prepared is lost"
ABORTED: Final = "transactions are aborted at their partitions"
DELETED: Final = "rows are deleted that readers have read or cannot see yet"
SET_BACK: Final = "the target is set back"
"""After this rows are gone: the query has to stop with an error."""
CHANGED: Final = "the target changes its form"
UNSAFE: Final = "a setting no longer keeps what the target acknowledges"
LOSSES: Final = frozenset({LOST, ABORTED, DELETED, SET_BACK})
"""What takes rows away."""
MAY_STOP: Final = {
    # a topic that is being created anew is unknown for a moment
    SET_BACK: r"WentBack|created again|UNKNOWN_TOPIC_OR_PART",
    DELETED: r"LogIncomplete.* now begins at offset|OutcomeUnknown.* rows are not all in .* were deleted",
    ABORTED: r"OutcomeUnknown.*rows are not all in",
    CHANGED: r"changed",
    UNSAFE: r"fsync = off|index.translog.durability=async",
}
"""After these the query may stop with an error that says so: what its name and text have in them."""
WRITES_REFUSED: Final = "writes are refused for a moment"
SECONDS: Final = 20.0
"""The sinks' ``timeout=``: a connection that breaks is tried again for so long."""


@dataclass(frozen=True)
class Family:
    """One kind of sink: how to make it, and proof rows as its writer takes them, as the JVM would render them."""

    sink: Callable[..., Sink]
    batch: Callable[[pa.Table], pa.RecordBatch]


def _as_columns(rows: pa.Table) -> pa.RecordBatch:
    (batch,) = rows.combine_chunks().to_batches()
    return batch


def _as_messages(rows: pa.Table) -> pa.RecordBatch:
    listed = rows.to_pylist()
    columns = {
        "key": pa.array([str(row["key"]).encode() for row in listed], pa.binary()),
        "value": pa.array([json.dumps(row).encode() for row in listed], pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)


def _as_documents(rows: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"source": pa.array([json.dumps(row) for row in rows.to_pylist()])})


FAMILIES: Final = {
    "postgres": Family(Postgres, _as_columns),
    "kafka": Family(Kafka, _as_messages),
    "elasticsearch": Family(Elasticsearch, _as_documents),
}


@dataclass(frozen=True)
class Place:
    """Fresh targets of one plan: sinks through the proxy, readers past it, and what others can do to the targets."""

    kinds: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]
    targets: Mapping[str, CheckedTarget]
    readers: Mapping[str, TargetReader]
    deeds: Mapping[str, Callable[[], None]]
    """What others do to the targets."""
    remove: Callable[[], None]


class PostgresSide:
    """One server; ``way`` is how the sinks commit, ``tables`` how many of them share the database."""

    framing = framings.Postgres
    proxy = 0

    def __init__(self, dsn: str, port: int, *, way: Mapping[str, Any], tables: int = 1) -> None:
        self._dsn = dsn
        self.port = port
        self._way = way
        self._tables = tables

    def fresh(self, port: int) -> Place:
        """Make a schema with tables and markers of its own."""
        schema = f"f{uuid.uuid4().hex[:10]}"
        columns = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in SCHEMA)
        tables = [f"{schema}.t{number}" for number in range(self._tables)]
        self._run(f"CREATE SCHEMA {schema}", *(f"CREATE TABLE {table} ({columns})" for table in tables))
        dsn = psycopg.conninfo.make_conninfo(self._dsn, port=port, sslmode="disable", gssencmode="disable")
        common = {"dsn": dsn, "marker_schema": schema, "timeout": SECONDS, **self._way}
        atomic = self._way.get("atomic", True)
        names = {f"t{number}": table for number, table in enumerate(tables)}
        return Place(
            dict.fromkeys(names, "postgres"),
            {name: {**common, "table": table} for name, table in names.items()},
            {name: CheckedTarget(name, atomic=atomic) for name in names},
            {name: PostgresReader(self._dsn, table, schema=schema) for name, table in names.items()},
            {
                LOST: lambda: self._lose(schema),
                **({} if atomic else {"a seal is lost": lambda: self._roll_back("all%")}),
                "sessions are ended": self._end_sessions,
                SET_BACK: lambda: self._set_back(schema, tables),
                CHANGED: lambda: self._change(tables[0]),
                UNSAFE: lambda: self._set_fsync("off"),
            },
            lambda: self._remove(schema),
        )

    def _remove(self, schema: str) -> None:
        # a query that stopped with an error leaves what is prepared, with its locks
        self._lose(schema)
        self._run(f"DROP SCHEMA {schema} CASCADE")
        self._set_fsync("on")

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True, options="-c lock_timeout=500ms") as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def _roll_back(self, part: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            query = "SELECT gid FROM pg_prepared_xacts WHERE gid LIKE %s"
            for (gid,) in connection.execute(query, [f"{PREFIX}:%:{part}"]).fetchall():
                # another one may have ended it
                with suppress(psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState):
                    connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))

    def _lose(self, schema: str) -> None:
        self._roll_back("%")
        with psycopg.connect(self._dsn, autocommit=True, options="-c lock_timeout=500ms") as connection:
            found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]).fetchall()
            for (name,) in found:
                if staging_owner(name):
                    with suppress(psycopg.errors.LockNotAvailable):
                        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, name)))

    def _change(self, table: str) -> None:
        # what is prepared holds a lock on the table
        with suppress(psycopg.errors.LockNotAvailable):
            self._run(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS more text NOT NULL DEFAULT 'x'")

    def _set_fsync(self, value: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            deadline = time.monotonic() + SECONDS
            while connection.execute("SHOW fsync").fetchone() != (value,):
                assert time.monotonic() < deadline, f"fsync does not become {value}"
                connection.execute(f"ALTER SYSTEM SET fsync = {value}".encode())
                connection.execute("SELECT pg_reload_conf()")
                time.sleep(0.01)

    def _end_sessions(self) -> None:
        self._run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'epochsink%'")

    def _set_back(self, schema: str, tables: list[str]) -> None:
        """Restore the tables and the markers as they were one epoch ago.

        A restored server has neither the sessions of the one before nor what was prepared there.
        """
        markers = sql.Identifier(schema, "marker")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self._end_sessions()
            self._lose(schema)
            with (
                suppress(psycopg.errors.UndefinedTable),
                psycopg.connect(self._dsn, options="-c lock_timeout=100ms") as connection,
            ):
                try:
                    # else a driver that tries again could still prepare what rests on the markers that go now
                    connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(markers))
                except psycopg.errors.LockNotAvailable:
                    continue
                newest = connection.execute(sql.SQL("SELECT max(epoch) FROM {}").format(markers)).fetchone()
                if newest is not None and newest[0] is not None:
                    for table in tables:
                        rows = sql.Identifier(*table.split("."))
                        connection.execute(sql.SQL("DELETE FROM {} WHERE epoch >= %s").format(rows), newest)
                    connection.execute(sql.SQL("DELETE FROM {} WHERE epoch = %s").format(markers), newest)
            return
        raise TimeoutError("the markers stay locked")


_SQL_TYPES: Final = {pa.string(): "text", pa.int32(): "int", pa.int64(): "bigint"}


class _KafkaReader(KafkaReader):
    """One that can keep what it has read, so that the topic need not."""

    _kept: tuple[tuple[int, int, bytes], ...] = ()

    def keep(self) -> None:
        """Keep every row that can be read now."""
        self._kept = tuple(self._records())

    def forget(self) -> None:
        """Keep nothing any more."""
        self._kept = ()

    def _records(self, fixed: Callable[[], None] = nothing) -> Iterator[tuple[int, int, bytes]]:
        kept = self._kept
        yield from kept
        # what is kept may still be in the topic: it is deleted later, or kept once more before that
        yield from (record for record in super()._records(fixed) if record not in kept)


class KafkaSide:
    """One broker, whose second listener advertises the proxy."""

    framing = framings.Kafka

    def __init__(self, servers: str, port: int, proxy: int) -> None:
        self._servers = servers
        self.port = port
        self.proxy = proxy

    def fresh(self, port: int) -> Place:
        """Make a topic."""
        topic = f"f{uuid.uuid4().hex[:10]}"
        admin = AdminClient({"bootstrap.servers": self._servers})
        admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(timeout=30)
        reader = _KafkaReader(self._servers, topic)
        options = {
            "bootstrap_servers": f"127.0.0.1:{port}",
            "topic": topic,
            "key": "key",
            "timeout": SECONDS,
        }
        return Place(
            {"topic": "kafka"},
            {"topic": options},
            {"topic": CheckedTarget("topic", atomic=False)},
            {"topic": reader},
            {
                LOST: self._abort_open,
                ABORTED: lambda: self._abort_at_partitions(topic),
                DELETED: lambda: self._delete_rows(reader, topic),
                SET_BACK: lambda: self._recreate(reader, topic),
                CHANGED: lambda: self._add_partition(admin, topic),
                WRITES_REFUSED: lambda: self._refuse(topic),
            },
            lambda: self._remove(admin, topic),
        )

    def _remove(self, admin: AdminClient, topic: str) -> None:
        # a query that has stopped, as it should, leaves open what nobody sweeps any more; the next plan would find it
        self._abort_open()
        admin.delete_topics([topic])[topic].result(timeout=30)

    def _recreate(self, reader: _KafkaReader, topic: str) -> None:
        reader.forget()
        admin = AdminClient({"bootstrap.servers": self._servers})
        admin.delete_topics([topic])[topic].result(timeout=30)
        deadline = time.monotonic() + SECONDS
        while topic in admin.list_topics(timeout=10).topics:
            assert time.monotonic() < deadline, f"{topic} is not deleted"
            time.sleep(0.02)
        admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(timeout=30)

    def _abort_at_partitions(self, topic: str) -> None:
        """Abort what is open as ``kafka-transactions.sh abort`` does: the coordinator is not told."""
        with kafka_kit.admin(self._servers) as client:
            at = [TopicPartition(topic, partition) for partition in range(2)]
            for place, found in client.describe_producers(at).items():
                for one in found.active_producers:
                    if one.current_transaction_start_offset >= 0:
                        # its coordinator may have ended it meanwhile
                        with suppress(TransactionCoordinatorFencedError):
                            client.abort_transaction(AbortTransactionSpec(place, one.producer_id, one.producer_epoch))

    def _delete_rows(self, reader: _KafkaReader, topic: str) -> None:
        at = [TopicPartition(topic, partition) for partition in range(2)]

        def stable() -> Any:
            latest = dict.fromkeys(at, OffsetSpec.LATEST)
            return client.list_partition_offsets(latest, isolation_level=IsolationLevel.READ_COMMITTED)

        with kafka_kit.admin(self._servers) as client:
            # again, if a transaction was committed as its rows were kept: readers may have read them since
            while True:
                before = stable()
                reader.keep()
                if stable() == before:
                    break
            client.delete_records(dict.fromkeys(at, -1))

    def _add_partition(self, admin: AdminClient, topic: str) -> None:
        # once more of a pair, and there is nothing to add
        with suppress(KafkaException):
            admin.create_partitions([NewPartitions(topic, 3)])[topic].result(timeout=30)

    def _refuse(self, topic: str) -> None:
        for replicas in ("2", "1"):
            with kafka_kit.admin(self._servers) as client:
                client.alter_configs([ConfigResource("topic", topic, configs={"min.insync.replicas": replicas})])
            time.sleep(0.3)

    def _abort_open(self) -> None:
        """Take the ids of open transactions, as a zombie or an administrator does."""
        with kafka_kit.admin(self._servers) as client:
            listed = [one for many in client.list_transactions(state_filters=["Ongoing"]).values() for one in many]
        for one in listed:
            if one.transactional_id.startswith(f"{PREFIX}."):
                settings = {
                    "bootstrap.servers": self._servers,
                    "transactional.id": one.transactional_id,
                    "log_level": 0,
                }
                Producer(settings).init_transactions(SECONDS)


class ElasticsearchSide:
    """One node."""

    framing = framings.Http
    proxy = 0

    def __init__(self, url: str, port: int) -> None:
        self._url = url
        self.port = port

    def fresh(self, port: int) -> Place:
        """Name an index, which the sink makes."""
        index = f"f{uuid.uuid4().hex[:10]}"
        options = {
            "hosts": f"http://127.0.0.1:{port}",
            "index": index,
            "create": {"number_of_shards": 1, "number_of_replicas": 0},
            "timeout": SECONDS,
        }
        return Place(
            {"index": "elasticsearch"},
            {"index": options},
            {"index": CheckedTarget("index", atomic=False)},
            {"index": ElasticsearchReader(self._url, index)},
            {
                SET_BACK: lambda: self._delete(index),
                UNSAFE: lambda: self._make_unsafe(index),
                WRITES_REFUSED: lambda: self._refuse(index),
            },
            lambda: self._delete(index),
        )

    def _delete(self, index: str) -> None:
        with Client(self._url) as client:
            client.indices.delete(index=index, ignore_unavailable=True)

    def _make_unsafe(self, index: str) -> None:
        with suppress(NotFoundError), Client(self._url) as client:
            client.indices.put_settings(index=index, settings={"index.translog.durability": "async"})

    def _refuse(self, index: str) -> None:
        # before its making there is nothing to refuse
        with suppress(NotFoundError), Client(self._url) as client:
            client.indices.put_settings(index=index, settings={"index.blocks.write": True})
            time.sleep(0.3)
            client.indices.put_settings(index=index, settings={"index.blocks.write": None})
