"""Several sinks of one query on one database: one transaction an epoch, whatever dies, is lost or is changed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from family_tables import FamilyTables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from family_tables import Rows
    from fix_postgres import Truth


TYPES = {"parents": {"id": "int64", "note": "string"}, "children": {"id": "int64", "parent": "int64"}}
WAYS = ["prepared", "staged"]


def epoch(number: int, note: str = "x") -> dict[str, Rows]:
    """Return rows of one epoch: three parents, and two children of each."""
    ids = range(3 * number, 3 * number + 3)
    return {
        "parents": [{"id": one, "note": f"{note}{one}"} for one in ids],
        "children": [{"id": 2 * one + twin, "parent": one} for one in ids for twin in (0, 1)],
    }


@pytest.fixture
def family(tmp_path: Path, pg_schema: str, pg_truth: Truth) -> Iterator[FamilyTables]:
    """Make two tables with a foreign key, which is not deferrable; the children's has no key that hides a duplicate."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.parents (id bigint PRIMARY KEY, note text)")
    pg_truth.execute(
        f"CREATE TABLE {pg_schema}.children (id bigint, parent bigint NOT NULL REFERENCES {pg_schema}.parents)"
    )
    common = {"dsn": pg_truth.dsn, "schema_for_markers": pg_schema}
    sinks: dict[str, dict[str, Any]] = {
        "parents": {"table": f"{pg_schema}.parents", "key": "id", **common},
        "children": {"table": f"{pg_schema}.children", **common},
    }
    made = FamilyTables(str(tmp_path / "checkpoint"), sinks, {name: dict(kinds) for name, kinds in TYPES.items()})
    yield made
    made.close()


def use(family: FamilyTables, **options: Any) -> None:
    for sink in family.sinks.values():
        sink.update(options)


def rows(family: FamilyTables, truth: Truth) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    return truth.rows(family.sinks["parents"]["table"]), truth.rows(family.sinks["children"]["table"])


def expected(*epochs: dict[str, Rows]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    found = [[tuple(row.values()) for one in epochs for row in one.get(name, [])] for name in TYPES]
    return sorted(found[0], key=repr), sorted(found[1], key=repr)


class Reader(threading.Thread):
    """Counts both tables in one snapshot, as often as it can."""

    def __init__(self, family: FamilyTables, dsn: str) -> None:
        super().__init__(daemon=True)
        self._query = (
            f"SELECT (SELECT count(*) FROM {family.sinks['parents']['table']}), "  # noqa: S608 - our own names
            f"(SELECT count(*) FROM {family.sinks['children']['table']})"
        )
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._ended = threading.Event()
        self.seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        while not self._ended.is_set():
            parents, children = self._connection.execute(self._query.encode()).fetchone() or (0, 0)
            self.seen.add((parents, children))

    def stop(self) -> set[tuple[int, int]]:
        self._ended.set()
        self.join()
        self._connection.close()
        return self.seen


@pytest.mark.parametrize("commit", WAYS)
def test_no_reader_sees_a_child_without_its_parent_or_a_table_ahead_of_the_other(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    use(family, commit=commit)
    driver = family.driver()
    reader = Reader(family, pg_truth.dsn)
    reader.start()
    try:
        for number in range(12):
            family.prepare(driver, number, epoch(number))
            assert len(pg_truth.prepared()) == (commit == "prepared")
            family.decide(number)
            assert driver.commit_decided()
    finally:
        seen = reader.stop()
    assert {children - 2 * parents for parents, children in seen} == {0}, seen
    assert len(seen) > 2, "the reader was not looking"
    assert rows(family, pg_truth) == expected(*map(epoch, range(12)))
    assert pg_truth.prepared() == pg_truth.staging(family.sinks["parents"]["schema_for_markers"]) == []


BEFORE_THE_RECORD = (
    "postgres.copied:3",
    "coordinator.vote.before",
    "postgres.merged",
    "postgres.prepared",
    "coordinator.vote.between",
    "coordinator.vote.between:2",
    "coordinator.record.before",
)
AFTER_THE_RECORD = (
    "coordinator.record.after",
    "coordinator.commit.before",
    "postgres.committed",
    "coordinator.commit.between",
    "coordinator.commit.between:2",
    "coordinator.done.before",
)
KILLS = {"prepared": (*BEFORE_THE_RECORD, *AFTER_THE_RECORD), "staged": ("postgres.merged", *AFTER_THE_RECORD)}


@pytest.mark.parametrize("commit", WAYS)
def test_killed_between_vote_and_commit_both_tables_are_exact(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    """One query lives through all kills; each life goes on with a new epoch after what the one before left."""
    use(family, commit=commit)
    epochs: list[dict[str, Rows]] = []
    for point in KILLS[commit]:
        epochs.append(epoch(len(epochs)))
        assert family.killed_at(point, epochs), point
        parents, children = rows(family, pg_truth)
        assert len(children) == 2 * len(parents), point
    family.play(epochs)
    assert rows(family, pg_truth) == expected(*epochs)
    assert pg_truth.prepared() == pg_truth.staging(family.sinks["parents"]["schema_for_markers"]) == []
