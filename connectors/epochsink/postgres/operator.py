"""What an operator asks of the PostgreSQL sinks of one database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import psycopg

from epochsink.postgres.audit import audit
from epochsink.postgres.committable import read_part
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.database import Database
from epochsink.postgres.examine import examine
from epochsink.postgres.letters import PostgresLetters
from epochsink.postgres.preflight import unreachable
from epochsink.postgres.remnants import remnants
from epochsink.postgres.repair import PostgresLosses
from epochsink.postgres.server import PING_SECONDS, Connection, deadline
from epochsink.postgres.session import Session
from epochsink.postgres.table import Table
from epochsink.sink import Committable, Comparison, Finding, Operator, Participant, Receipt, Remnant


class PostgresOperator(Operator):
    """Answers an operator's commands. ``ask`` lends the session of a sink; its second argument says what for."""

    def __init__(
        self,
        participant: Participant,
        tables: Mapping[str, Table],
        asking: Mapping[str, Session],
        ask: Callable[..., AbstractContextManager[Database]],
    ) -> None:
        self._marks = participant.marks
        self._members = participant.members
        self._tables = tables
        self._asking = asking
        self._ask = ask

    def examine(self, sink: str) -> Iterator[Finding]:
        """Look at the server; see `epochsink.postgres.examine`."""
        config: PostgresConfig = self._members[sink]
        try:
            yield from examine(config, self._asking[sink].database().connection)
        except psycopg.Error as error:
            yield Finding("server", unreachable(config, error), is_fatal=True)

    def pending(self) -> list[Remnant]:
        """Return the prepared transactions and staging tables of these sinks."""
        keys = {table.key for table in self._tables.values()}
        first, named = next(iter(self._tables)), ", ".join(map(str, self._tables.values()))
        # not patient: an operator waits for the answer
        with (
            self._ask(first, f"looking for what {named} have pending", patient=False) as database,
            deadline(database.connection, PING_SECONDS),
        ):
            return [remnant for remnant in remnants(database) if remnant.key in keys]

    def audit(self, sink: str, receipts: Sequence[Receipt], newest: int) -> Sequence[Comparison]:
        """Count the rows that each epoch has appended; see `epochsink.postgres.audit`."""
        del newest
        table = self._tables[sink]
        with self._ask(sink, f"comparing {table} with the ledger") as database:
            return audit(database.connection, table.located(database), receipts)

    def letters(self, sink: str) -> PostgresLetters:
        """Return the letters of a sink, whether it sets rows aside now or did so before."""
        return PostgresLetters(self._tables[sink], partial(self._lend, sink))

    @contextmanager
    def _lend(self, sink: str, doing: str) -> Iterator[Connection]:
        with self._ask(sink, doing) as database:
            yield database.connection

    def losses(self) -> PostgresLosses:
        """Return a search by marker rows; see `epochsink.postgres.repair`."""
        return PostgresLosses(self._marks, self._tables, self._ask)

    def describe(self, part: Committable) -> str:
        """Return the prepared transaction's name, or the tables in which rows are staged."""
        prepared = read_part(part)
        return prepared.gid or f"rows staged in {', '.join(sorted(prepared.tables))}"
