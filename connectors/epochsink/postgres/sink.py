"""The PostgreSQL sink that users construct."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink import arguments
from epochsink.errors import ConfigurationError
from epochsink.postgres.config import Commit, PostgresConfig, Rejected, column_names, connection_string, table_name
from epochsink.postgres.spooled import SpooledWriter
from epochsink.sink import Participant, Sink, SinkWriter, Task
from epochsink.sink.row_json import first_of, marked_json, not_utf8, value_json
from epochsink.sink.sql import field_of, operand, quoted, text_of

if TYPE_CHECKING:
    from epochsink.postgres.server import Server


@arguments.checked_names
class Postgres(PostgresConfig, Sink):
    """A PostgreSQL table (14 or newer) that each epoch's rows are appended to, or upserted into, exactly once.

    Connect to the server itself or to a pooler in session mode. Columns of the table that the row lacks keep their
    default or, in an upsert, their value. Structs and maps become JSON.

    Args:
        dsn: libpq URL or "key=value ..." string.
        table: "table", "schema.table", or a tuple of one or two names if they contain dots. Names are literal: case
            counts, and everything is quoted.
        key: columns of a primary key or unique constraint; rows replace the row of their key. None: rows are appended.
        select: Spark SQL expressions that make the row, each named as its column of the table.
        where: Spark SQL predicate: which rows go to this sink.
        order_by: Spark SQL; if an epoch has several rows of a key, the one with the largest value wins, and nulls lose.
            Without it such an epoch is refused.
        delete_when: Spark SQL predicate; rows for which it is true delete their key instead.
        newer_wins: column of the row: a row replaces or deletes the stored one only if its value is not smaller. Null
            is the smallest. It also decides within an epoch, before ``order_by``.
        skip_unchanged: leave a stored row untouched if the new one has the same bytes.
        accumulate: {"column": "sum", "min" or "max"}: combine the value with the stored one instead of replacing it.
            Nulls are ignored, as SQL's aggregates do. Or {"column": "stored || new"}: an immutable SQL expression of
            PostgreSQL's over the stored value and the row's. Rows of a key within an epoch are combined first, in the
            order of ``order_by``.
        atomic: True: readers see all of an epoch or none of it. False: each task commits on its own, which is faster;
            an epoch becomes visible task by task.
        commit: "prepared": PREPARE TRANSACTION checks all constraints before the checkpoint decides (needs
            max_prepared_transactions > 0). "staged": rows wait in a logged table and are merged after the decision.
            "auto": prepared if the server can. atomic=False is always prepared.
        marker_schema: schema of the marker table and the staging tables; created if the user may.
        validate: merge staged rows on trial before the decision and roll that back, so that constraints and triggers
            refuse rows in time; costs the merge twice. Prepared epochs are checked anyway.
        on_rejected: "stop": a row that the table refuses stops the query. "dead_letter": the row goes to the table
            ``dead_letter`` in ``marker_schema``, in the transaction of its epoch, and the others go on. Needs
            ``atomic=True``, and goes with no ``accumulate``.
        letters_limit: the share of an epoch's rows, 0 to 1, above which dead letters stop the query after all.
        spool: keep a durable copy of the rows until the epoch is done, from which it can be prepared again. With
            ``atomic=True`` tasks write only this copy, and the driver copies the rows from it. False: only with
            ``atomic=False``; what the server loses before the commit stops the query.
        create: create the table if it does not exist, from the row's schema, with ``key`` as its primary key.
        add_columns: add the columns of the row that the table lacks, nullable, before the first row.
        timeout: seconds that each wait for a lock, or for a synchronous standby, may take.
        options: libpq's connection parameters by name, e.g. {"password": "...", "sslrootcert": "..."}.
        allow_insecure: connect to another host without an explicit sslmode, so perhaps unencrypted.

    Raises `ConfigurationError`; nothing is connected to.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        table: str | Sequence[str],
        key: str | Sequence[str] | None = None,
        select: str | Sequence[str] = ("*",),
        where: str | None = None,
        order_by: str | Sequence[str] | None = None,
        delete_when: str | None = None,
        newer_wins: str | None = None,
        skip_unchanged: bool = False,
        accumulate: Mapping[str, str] | None = None,
        atomic: bool = True,
        commit: Commit = "auto",
        marker_schema: str = "epochsink",
        validate: bool = False,
        on_rejected: Rejected = "stop",
        letters_limit: float = 1.0,
        spool: bool = True,
        create: bool = False,
        add_columns: bool = False,
        timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
        allow_insecure: bool = False,
    ) -> None:
        arguments.require_package("Postgres", "postgres", "psycopg", "pgpq")
        super().__init__(
            dsn=connection_string(dsn),
            table=table_name(table),
            key=column_names("key", key),
            select=arguments.expressions("select", select) or ("*",),
            where=where,
            order_by=arguments.expressions("order_by", order_by),
            delete_when=delete_when,
            newer_wins=newer_wins,
            skip_unchanged=skip_unchanged,
            accumulate={} if accumulate is None else accumulate,
            atomic=atomic,
            commit=commit,
            marker_schema=marker_schema,
            validate=validate,
            on_rejected=on_rejected,
            letters_limit=letters_limit,
            spool=spool,
            create=create,
            add_columns=add_columns,
            timeout=timeout,
            options={} if options is None else options,
            allow_insecure=allow_insecure,
        )
        self._server()  # refuses a wrong dsn= or options= here, and not in the first task
        # a task that waits for a row of another one waits for the decision, which waits for all tasks
        self._spread = () if atomic else tuple(self._origin(name) for name in self.key)

    @property
    def distribute_by(self) -> Sequence[str]:
        """The key, as expressions over the stream, with ``atomic=False``: tasks must not share keys."""
        return self._spread

    def count_deletes(self, rows: pa.RecordBatch) -> int:
        """Return how many rows delete their key."""
        if self.delete_when is None:
            return 0
        from epochsink.postgres.staging import DELETED  # noqa: PLC0415 - needs pgpq, which the driver checks for first

        return int(rows.column(DELETED).true_count)

    @property
    def commits_with(self) -> Hashable | None:
        """What sinks have in common whose rows of an epoch go into one transaction; None with ``atomic=False``."""
        # "auto" becomes the same for all sinks of one server
        return (self._server().address, self.commit == "staged") if self.atomic else None

    def _origin(self, column: str) -> str:
        """Return the expression that ``select`` calls ``column``. Raises `ConfigurationError` if it does not say."""
        origin = arguments.origin(self.select, column)
        if origin is not None:
            return origin
        raise ConfigurationError(
            f"atomic=False spreads rows over tasks by the key, and select= does not say what {column!r} is: "
            f"{list(self.select)}",
            hint=f"write it with AS: '... AS {column}'",
        )

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the row's columns, structs and maps as JSON; whether to delete; what decides between rows of a key.

        Raises `ConfigurationError`.
        """
        from epochsink.postgres.row_mapping import is_nested  # noqa: PLC0415 - the client is an extra
        from epochsink.postgres.staging import DELETED, is_reserved, rank_column  # noqa: PLC0415 - the client is an extra

        for name in filter(is_reserved, schema.names):
            raise ConfigurationError(
                f"the row has a column {name!r}, which is a reserved name",
                hint="select it under another name with AS",
            )
        columns = [_rendered(row, field, as_json=is_nested(field.type)) for field in schema]
        if self.delete_when is not None:
            columns.append(f"coalesce({operand(self.delete_when)}, false) AS `{DELETED}`")
        ranks = (_operand(row, schema, expression) for expression in self.order_by)
        return [*columns, *(f"{rank} AS `{rank_column(place)}`" for place, rank in enumerate(ranks))]

    def check_columns(self, schema: pa.Schema) -> None:
        """Refuse values of order_by= that have no order in PostgreSQL. Raises `ConfigurationError`."""
        from epochsink.postgres.staging import rank_column  # noqa: PLC0415 - the client is an extra
        from epochsink.postgres.types import Mismatch, rank_encoding  # noqa: PLC0415 - likewise

        for place, expression in enumerate(self.order_by):
            try:
                rank_encoding(schema.field(rank_column(place)))
            except Mismatch as mismatch:
                raise ConfigurationError(
                    f"invalid order_by={expression!r}: {mismatch}", hint="for example order_by=['s.a', 's.b']"
                ) from None

    def writer(self, task: Task) -> SinkWriter:
        """Make the writer of one task attempt. It connects with ``atomic=False``. Raises `PrepareFailed`."""
        if self.atomic:
            return SpooledWriter(task)
        from epochsink.postgres.writer import by_task_writer  # noqa: PLC0415 - the client is an extra

        return by_task_writer(self, task)

    def participant(self, members: Mapping[str, PostgresConfig]) -> Participant:
        """Make the driver's side; does not connect yet."""
        from epochsink.postgres.committer import PostgresCommitter  # noqa: PLC0415 - the client is an extra

        return PostgresCommitter(members)

    def _server(self) -> Server:
        from epochsink.postgres.server import Server  # noqa: PLC0415 - the client is an extra

        return Server.of(self)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._server()!r})"


def _rendered(row: str, field: pa.Field, *, as_json: bool) -> str:
    value = field_of(row, field.name)
    return f"{_json(value, field.type) if as_json else value} AS {quoted(field.name)}"


def _json(value: str, kind: pa.DataType) -> str:
    """Return the SQL of a value as JSON; with text that is not UTF-8 in it, with the text of the value before it.

    The server refuses these bytes then, as in a column of text. Spark's JSON has U+FFFD in their place.
    """
    condition = not_utf8(value, kind)
    mark = None if condition is None else first_of([(condition, text_of(value))])
    return marked_json(value_json(value, kind), mark)


def _operand(row: str, schema: pa.Schema, expression: str) -> str:
    """Return a column of the row by its name, anything else as an expression over the stream."""
    return field_of(row, expression) if expression in schema.names else operand(expression)
