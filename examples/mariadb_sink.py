"""A sink of one's own on a database with XA transactions: rows appended to a table of MariaDB, each epoch once.

Each task writes its rows in an XA transaction and prepares it. The driver commits it after Spark's decision, from a
connection of its own: since MariaDB 10.5 a prepared transaction outlives the connection that made it. A row of the
table ``epochsink_marks`` is written in the same transaction: it shows later that the transaction was committed.

Needs the package PyMySQL, and InnoDB tables. docs/how-to/write-a-sink.md explains what a sink consists of.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import pymysql

from epochsink import sink as es
from epochsink.errors import PrepareFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pymysql.connections import Connection

_MARKS_DDL: Final = """
CREATE TABLE IF NOT EXISTS epochsink_marks (
    sink char(20) NOT NULL, epoch bigint NOT NULL, task char(32) NOT NULL, attempt char(32) NOT NULL,
    PRIMARY KEY (sink, epoch, task)
) ENGINE=InnoDB
"""
_UNKNOWN_XID: Final = 1397
"""XAER_NOTA: committed or rolled back by now, never prepared, or still attached to the connection that prepared it."""
_LOOK_AGAIN_SECONDS: Final = 0.02
_MARKS_KEPT: Final = 100
"""Epochs whose marks stay: a driver that was paused for longer finds its successor in the ledger."""


@dataclass(frozen=True)
class MariaDB(es.Sink):
    """Appends rows to ``table`` of the database that ``url`` names: mysql://USER:PASSWORD@HOST:PORT/DATABASE.

    An answer of the server is waited for at most ``timeout`` seconds.
    """

    url: str = field(repr=False)
    table: str
    timeout: float = 30.0

    def connect(self) -> Connection[Any]:
        """Return a new connection. Raises `pymysql.Error`."""
        parts = urlsplit(self.url)
        return pymysql.connect(
            host=parts.hostname or "localhost",
            port=parts.port or 3306,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=unquote(parts.path[1:]),
            charset="utf8mb4",
            autocommit=True,
            read_timeout=self.timeout,
            write_timeout=self.timeout,
            # a value that a column would have to change is an error
            init_command="SET SESSION sql_mode='STRICT_ALL_TABLES', time_zone='+00:00'",
        )

    def columns(self, row: str, schema: pa.Schema) -> list[str]:
        return [f"{row}.{_quoted(name)} AS {_quoted(name)}" for name in schema.names]

    def writer(self, task: es.Task) -> es.SinkWriter:
        return MariaDBWriter(self, task, task.uuid)

    def participant(self, members: es.Members) -> es.Participant:
        return MariaDBParticipant(members)


class Xid(NamedTuple):
    """The name of an XA transaction; the server takes 64 bytes for each of the two."""

    key: str
    generation: int
    epoch: int
    branch: str

    def __str__(self) -> str:
        return f"'{self.key}:{self.generation}:{self.epoch}','{self.branch}'"

    @classmethod
    def parse(cls, global_length: int, data: bytes) -> Xid | None:
        """Return the name of which ``XA RECOVER`` shows ``data``; None if it is not one of ours."""
        match data[:global_length].decode(errors="replace").split(":"):
            case [key, generation, epoch] if generation.isdecimal() and epoch.isdecimal():
                return cls(key, int(generation), int(epoch), data[global_length:].decode(errors="replace"))
        return None


class MariaDBWriter(es.SinkWriter):
    """Writes the rows of one task, or of one that was lost (``task``) again."""

    def __init__(self, sink: MariaDB, task: es.Task, mark: str) -> None:
        self._table, self._mark, self._attempt = sink.table, mark, task.epoch.attempt
        self._xid = Xid(es.identity_key(task.identity), task.identity.generation, task.epoch.number, task.uuid)
        with _translated("connecting"):
            self._connection = sink.connect()
            self._cursor = self._connection.cursor()
            self._cursor.execute(f"XA START {self._xid}")

    def write(self, batch: pa.RecordBatch) -> None:
        names = ", ".join(map(_quoted, batch.schema.names))
        insert = f"INSERT INTO {_quoted(self._table)} ({names}) VALUES ({', '.join(['%s'] * batch.num_columns)})"  # noqa: S608
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        with _translated(f"writing to {self._table}"):
            self._cursor.executemany(insert, list(rows))

    def prepare(self) -> es.Committable:
        mark = (self._xid.key, self._xid.epoch, self._mark, self._attempt)
        with _translated(f"preparing rows of {self._table}"), closing(self._connection):
            self._cursor.execute("INSERT INTO epochsink_marks VALUES (%s, %s, %s, %s)", mark)
            self._cursor.execute(f"XA END {self._xid}")
            self._cursor.execute(f"XA PREPARE {self._xid}")
        # closed: a transaction that is attached to a connection is not committed from another one
        return {"xid": list(self._xid), "mark": self._mark}

    def abort(self) -> None:
        self._connection.close()  # what is not prepared is rolled back


class MariaDBParticipant(es.SimpleParticipant):
    """Commits the transactions that the tasks of one sink have prepared."""

    def __init__(self, members: Mapping[str, MariaDB]) -> None:
        super().__init__(members)
        (self._sink,) = members.values()

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        try:
            found = self._ask("SELECT @@innodb_flush_log_at_trx_commit, @@version")
            engine = self._ask(
                "SELECT engine FROM information_schema.tables WHERE table_schema = database() AND table_name = %s",
                self._sink.table,
            )
            self._ask(_MARKS_DDL)
        except pymysql.Error as refused:
            return [f"MariaDB refuses: {refused}; check the URL, the user's rights, and that the server runs"]
        ((flush, version),) = found
        findings = []
        if not engine or str(engine[0][0]).lower() != "innodb":
            findings.append(f"table {self._sink.table} is not an InnoDB table of this database: create it")
        if flush != 1:
            findings.append(
                f"innodb_flush_log_at_trx_commit is {flush}: what is prepared would not survive a crash; set it to 1"
            )
        if tuple(map(int, version.split("-")[0].split(".")[:2])) < (10, 5):
            findings.append(f"MariaDB {version} ends a prepared transaction with its connection; take 10.5 or later")
        return findings

    def open(self, identity: es.Identity) -> es.Joining:
        self._identity, self._key = identity, es.identity_key(identity)
        return super().open(identity)

    def _ask(self, statement: str, *values: object) -> Sequence[Any]:
        with closing(self._sink.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values)
            rows: Sequence[Any] = cursor.fetchall()
            return rows

    def _prepared(self) -> list[Xid]:
        found = (Xid.parse(length, data) for _, length, _, data in self._ask("XA RECOVER"))
        return [xid for xid in found if xid is not None and xid.key == self._key]

    def remnants(self, recorded: es.Recorded) -> list[es.Remnant]:
        parts = {Xid(*part["xid"]): part for each in recorded for part in each}
        xids = self._prepared()
        return [es.Remnant("XA transaction", str(xid), xid.generation, of=parts.get(xid)) for xid in xids]

    def end(self, remnants: Sequence[es.Remnant]) -> list[str]:
        return [remnant.name for remnant in remnants if self._end("ROLLBACK", remnant.name)]

    def marks(self, sink: str, done: es.LastDone | None, pending: es.LastDone | None) -> es.Marks:
        # the newest two epochs with rows: the one that is done, and the one that may be committed in part
        found = self._ask(
            "SELECT task, epoch, attempt FROM epochsink_marks WHERE sink = %s AND epoch >= (SELECT min(epoch) FROM "
            "(SELECT DISTINCT epoch FROM epochsink_marks WHERE sink = %s ORDER BY epoch DESC LIMIT 2) AS newest)",
            self._key,
            self._key,
        )
        marks = {task: es.Mark(epoch, attempt) for task, epoch, attempt in found}
        must, may = (es.marks_left(last, lambda part: part["mark"]) for last in (done, pending))
        return es.Marks(f"table {self._sink.table}", marks, must, may)

    def holds(self, sink: str, part: es.Committable) -> bool:
        return Xid(*part["xid"]) in self._prepared()

    def commit_part(self, sink: str, epoch: es.Epoch, ballot: es.Ballot, part: es.Committable) -> es.Verdict:
        xid, deadline = Xid(*part["xid"]), time.monotonic() + self._sink.timeout
        try:
            while not self._end("COMMIT", xid):
                if xid not in self._prepared():
                    # after that look: a commit by another driver has left the list only when its mark can be read
                    return self._judged(epoch, part, f"XA transaction {xid} is gone")
                # it is still attached to the connection that prepared it, which the server is about to close
                if time.monotonic() > deadline:
                    return es.Verdict(es.Outcome.UNKNOWN, f"XA transaction {xid} is attached to another connection")
                time.sleep(_LOOK_AGAIN_SECONDS)
        except pymysql.Error as lost:
            return es.Verdict(es.Outcome.UNKNOWN, f"the server did not answer: {lost}")
        return es.COMMITTED

    def _end(self, how: str, xid: object) -> bool:
        """Commit or roll back a transaction; return whether the server knew it, and could."""
        try:
            self._ask(f"XA {how} {xid}")
        except pymysql.Error as refused:
            if refused.args[0] != _UNKNOWN_XID:
                raise
            return False
        return True

    def _judged(self, epoch: es.Epoch, part: es.Committable, evidence: str) -> es.Verdict:
        question = "SELECT attempt FROM epochsink_marks WHERE sink = %s AND epoch = %s AND task = %s"
        found = self._ask(question, self._key, epoch.number, part["mark"])
        if not found:
            return es.Verdict(es.Outcome.ABORTED, f"{evidence}, and its mark is absent")
        if found[0][0] != epoch.attempt:
            return es.Verdict(es.Outcome.UNKNOWN, f"{evidence}, and attempt {found[0][0]} has committed its epoch")
        return es.COMMITTED

    def replay(self, epoch: es.Epoch, part: es.Committable, ballots: es.Ballots, attempt: str) -> es.Committable:
        (ballot,), task = ballots.values(), es.Task(self._identity, epoch, 0, attempt)
        # the same mark: of two drivers that write the lost rows again, one can commit
        return es.write_all(MariaDBWriter(self._sink, task, part["mark"]), ballot.rows.read(part["mark"]))

    def finish(self, epoch: es.Epoch, ballots: es.Ballots) -> None:
        self._ask("DELETE FROM epochsink_marks WHERE sink = %s AND epoch < %s", self._key, epoch.number - _MARKS_KEPT)


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raise what the client raises as an error that fails the task."""
    try:
        yield
    except pymysql.Error as refused:
        raise PrepareFailed(f"{doing}: MariaDB refuses: {refused}", hint="Spark runs the epoch again") from refused


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
