"""Rows that a table refuses until its rule is dropped, and their dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink.postgres.staging import DELETED
from epochsink.sink import Chosen, Outcome

if TYPE_CHECKING:
    from fix_postgres import Driver, MakeDriver, Truth

    from epochsink.postgres.letters import PostgresLetters
    from epochsink.sink import Letter

ASIDE: dict[str, Any] = {"on_rejected": "dead_letter", "spool": True}
ALL = Chosen()


def rows(*given: tuple[int | None, str], gone: list[bool] | None = None) -> pa.RecordBatch:
    ids, notes = zip(*given, strict=True)
    batch = pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array(notes, pa.string())})
    return batch if gone is None else batch.append_column(DELETED, pa.array(gone))


def apply(driver: Driver, number: int, batch: pa.RecordBatch) -> int | None:
    """Take an epoch through all its steps; return how many rows became dead letters."""
    written, parts = driver.prepare(number, batch)
    (verdict,) = driver.commit(written, parts)
    assert verdict.outcome is Outcome.COMMITTED
    driver.committer.finish(written.epoch, parts)
    return verdict.set_aside


def letters_of(driver: Driver) -> PostgresLetters:
    found: PostgresLetters = driver.committer.participant.operator().letters(driver.identity.sink)
    return found


def read(driver: Driver) -> list[Letter]:
    return letters_of(driver).read(ALL, 100)


def refusing(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth, rule: str = "id > 0", **options: Any) -> Driver:
    """Return a driver of a table that refuses rows until its constraint ``rule`` is dropped (`correct`)."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text, CONSTRAINT rule CHECK ({rule}))")
    gone = [False] if "delete_when" in options else None
    return pg_driver(table, rows((1, "a"), gone=gone), **ASIDE, **options)


def correct(pg_schema: str, pg_truth: Truth) -> None:
    pg_truth.execute(f"ALTER TABLE {pg_schema}.t DROP CONSTRAINT rule")
