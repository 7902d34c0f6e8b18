"""Compare receipts with the table: for each epoch its marker, and the rows that its transaction has inserted.

Each row names the transaction that wrote it (xmin). The marker was inserted by the same transaction. So the rows of an
epoch can be counted in a table that other programs write to as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from epochsink.postgres.applied_epochs import JOINED, marks_of
from epochsink.postgres.marker_table import TABLE
from epochsink.postgres.server import Connection
from epochsink.postgres.table import Table
from epochsink.sink import Comparison, LastDone, Receipt

_MARKERS: Final = "SELECT epoch, part, attempt, xmin::text FROM {} WHERE key = %s AND (epoch = %s OR epoch >= %s)"
_ROWS: Final = """
SELECT CASE WHEN xmin = ANY (%(ours)s::xid[]) THEN xmin::text END, count(*) FROM {}
WHERE age(xmin) <= (SELECT max(age(each)) FROM unnest(%(ours)s::xid[]) AS each) GROUP BY 1
"""
"""Rows since the oldest of these transactions; those of other transactions together, as NULL."""


def audit(connection: Connection, table: Table, receipts: Sequence[Receipt]) -> list[Comparison]:
    """Return how each receipt compares with the table. Raises `psycopg.Error`."""
    if not receipts:
        return []
    oldest = min(receipt.epoch for receipt in receipts)
    statement = sql.SQL(_MARKERS).format(sql.Identifier(table.config.marker_schema, TABLE))
    marker_rows = connection.execute(statement, [table.key, JOINED, oldest]).fetchall()
    attempts: dict[int, dict[str, str]] = {}
    transactions: dict[int, set[str]] = {}
    for epoch, part, attempt, xmin in marker_rows:
        attempts.setdefault(epoch, {})[part] = attempt
        transactions.setdefault(epoch, set()).add(xmin)
    # an upsert's rows lose their xmin to the epoch that replaces them next
    rows = None if table.config.key else _Rows(connection, table, transactions)
    return [_compared(receipt, attempts.get(receipt.epoch, {}), rows) for receipt in receipts]


def _compared(receipt: Receipt, marked: dict[str, str], rows: _Rows | None) -> Comparison:
    wanted = {part: mark.attempt for part, mark in marks_of(LastDone(receipt.epoch, "", tuple(receipt.parts))).items()}
    if not marked or any(marked.get(part) != attempt for part, attempt in wanted.items()):
        return receipt.differs("its marker is missing, or another attempt has left it")
    if rows is None:
        return receipt.not_compared("its marker is there; rows are not counted, as later epochs replace rows of a key")
    return rows.compare(receipt)


class _Rows:
    """The rows of a table without key, counted by the transaction that inserted them."""

    def __init__(self, connection: Connection, table: Table, transactions: dict[int, set[str]]) -> None:
        self._transactions = transactions
        ours = sorted(set().union(*transactions.values()))
        counted = connection.execute(sql.SQL(_ROWS).format(table.relation.quoted), {"ours": ours}).fetchall()
        self._counts: dict[str | None, int] = dict(counted)

    def compare(self, receipt: Receipt) -> Comparison:
        """Compare the number of rows; the epoch has a marker."""
        own = self._transactions[receipt.epoch]
        if any(own & others for epoch, others in self._transactions.items() if epoch != receipt.epoch):
            return receipt.not_compared(
                "its marker is there; one transaction has inserted the markers of several epochs: they were restored "
                "from a dump, which does not tell which row belongs to which epoch"
            )
        count = sum(self._counts.get(transaction, 0) for transaction in own)
        expected = receipt.rows - (receipt.set_aside or 0)
        if count == 0 < expected and self._counts.get(None):
            return receipt.not_compared(
                "its marker is there; all rows since then are of other transactions: another program has replaced "
                "them, ALTER TABLE has written the table again, or they were inserted under savepoints"
            )
        return receipt.counted(
            count, expected, "another program has deleted or changed some, or a trigger has kept them back"
        )
