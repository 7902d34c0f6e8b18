"""A PostgreSQL whose table, marker or prepared transactions are those of an older state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from fix_postgres import Truth, gids
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import WentBack
from epochsink.identity import PreparedName
from epochsink.postgres import Postgres
from epochsink.protocol.coordinator import Plan
from epochsink.sink import Ballot, Epoch, LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_postgres import MakeDriver

    from epochsink.sink import Participant
    from epochsink_devkit.services import PostgresService

    MakeQuery = Callable[..., "Query"]

MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"atomic": False}, id="by-task"),
]


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint)")
    return f"{pg_schema}.orders"


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_table_is_noticed_before_the_vote_in_it_and_before_the_commit(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    driver.run(0, orders(0))
    written, parts = driver.prepare(1, orders(1))
    driver.commit(written, parts)
    last = LastDone(1, written.epoch.attempt, tuple(parts))
    driver.committer.verify_applied(last, None)
    following, prepared = driver.prepare(2, orders(2))
    driver.committer.verify_applied(last, LastDone(2, following.epoch.attempt, tuple(prepared)))
    driver.committer.abort_orphans([])

    # as restored from a backup that was made after epoch 0
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker WHERE epoch = 1")  # noqa: S608 - our own names
    pg_truth.execute(f"DELETE FROM {table} WHERE id = 1")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="epoch 1 is done: the target is the older copy"):
        driver.committer.verify_applied(last, None)
    again = driver.write(2, orders(2))
    with pytest.raises(WentBack, match="older copy"):
        driver.committer.vote(again.epoch, again.committables, again.rows, last)
    assert pg_truth.rows(table) == [(0,)]

    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="no marker of this query"):
        driver.committer.verify_applied(last, None)
    driver.committer.abort_orphans([])
    pg_truth.execute(f"DROP TABLE {pg_schema}.marker")
    with pytest.raises(WentBack, match="no marker of this query"):
        driver.committer.verify_applied(last, None)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]])
def test_a_commit_that_a_failover_has_lost_is_made_again_and_never_rolled_back(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The standby has PREPARE TRANSACTION and lacks COMMIT PREPARED; the ledger calls the epoch done."""
    driver = pg_driver(table, orders(1), **mode)
    driver.run(0, orders(0))
    written, parts = driver.prepare(1, orders(1))
    with pytest.raises(WentBack, match="its epoch is done"):
        driver.committer.abort_orphans([], parts)
    assert sorted(pg_truth.prepared()) == gids(parts)
    driver.committer.verify_applied(LastDone(1, written.epoch.attempt, tuple(parts)), None)
    assert pg_truth.prepared() == []
    assert pg_truth.rows(table) == [(0,), (1,)]


def test_a_failover_that_has_lost_the_epoch_before_is_not_hidden_by_tasks_that_prepared_beside_its_commit(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The standby has what the tasks of epoch 2 prepared, and neither the commit of epoch 1 nor the seal of epoch 2."""
    driver = pg_driver(table, orders(1), atomic=False)
    driver.run(0, orders(0))
    _, before = driver.prepare(1, orders(1))
    written = driver.write(2, orders(2), orders(3))
    seal = str(PreparedName.of(driver.identity, written.epoch, "all"))
    parts = [{**before[0], "gid": seal, "attempt": written.epoch.attempt}, *written.committables]
    with pytest.raises(WentBack, match="the rows of epochs 1 to 2 are missing"):
        driver.committer.verify_applied(LastDone(2, written.epoch.attempt, tuple(parts)), None)
    assert sorted(pg_truth.prepared()) == sorted([*gids(before), *gids(written.committables)])
    assert pg_truth.rows(table) == [(0,)]


def test_an_epoch_that_an_older_version_recorded_without_a_seal_is_committed_and_committed_again(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), atomic=False)
    written, (seal, *parts) = driver.prepare(0, orders(0), orders(1))
    pg_truth.execute(f"ROLLBACK PREPARED '{seal['gid']}'")
    driver.commit(written, parts)
    last = LastDone(0, written.epoch.attempt, tuple(parts))
    driver.committer.verify_applied(last, None)
    written, voted = driver.prepare(1, orders(2), orders(3))
    pg_truth.execute(f"ROLLBACK PREPARED '{voted[0]['gid']}'")
    driver.commit(written, voted[1:2])
    driver.committer.verify_applied(LastDone(1, written.epoch.attempt, tuple(voted[1:])), None)
    assert pg_truth.prepared() == []
    assert pg_truth.rows(table) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("key", [None, "id"], ids=["append", "upsert"])
def test_a_seal_that_a_failover_has_lost_beside_rows_that_are_there_is_repaired_where_no_later_row_is_replaced(
    key: str | None, table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The driver committed the seal before the failover, and the tasks' transactions after it."""
    pg_truth.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    driver = pg_driver(table, orders(1), atomic=False, key=key)
    written, parts = driver.prepare(0, orders(0), orders(1))
    driver.commit(written, parts)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker WHERE epoch = 0 AND part = 'all'")  # noqa: S608 - our own names
    last, participant = LastDone(0, written.epoch.attempt, tuple(parts)), driver.committer.participant
    with pytest.raises(WentBack, match="markers of some parts of epoch 0") as caught:
        driver.committer.verify_applied(last, None)
    assert caught.value.facts["lacks_from"] == 0
    if key:
        with pytest.raises(WentBack, match="without its seal"):
            participant.operator().losses().lacking("table", last)
        return
    assert participant.operator().losses().lacking("table", last) == parts[:1]
    whole = Ballot(parts, written.rows, LastDone(-1, "", ()))
    (verdict,) = participant.commit(written.epoch, {"table": replace(whole, parts=parts[:1])})["table"]
    assert verdict.outcome is Outcome.ABORTED
    seal = participant.replay(written.epoch, parts[0], {"table": whole}, "")
    (verdict,) = participant.commit(written.epoch, {"table": replace(whole, parts=[seal])})["table"]
    assert verdict.outcome is Outcome.COMMITTED
    driver.committer.verify_applied(last, None)
    assert pg_truth.rows(table) == [(0,), (1,)]


@pytest.mark.parametrize("mode", MODES)
def test_a_table_restored_on_its_own_is_noticed_until_it_is_accepted(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The markers, which lie in another schema, say that every epoch is there."""
    driver = pg_driver(table, orders(1), **mode)
    driver.committer.verify_applied(None, None)
    pg_truth.execute(f"DROP TABLE {table}; CREATE TABLE {table} (id bigint)")
    driver.committer.verify_applied(None, None)  # nothing was in it
    driver.run(0, orders(0))
    pg_truth.execute(f"CREATE TABLE {pg_schema}.backup AS SELECT * FROM {table}")  # noqa: S608 - our own names
    written, parts = driver.prepare(1, orders(1))
    driver.commit(written, parts)
    last = LastDone(1, written.epoch.attempt, tuple(parts))
    driver.committer.verify_applied(last, None)
    pg_truth.execute(f"ALTER TABLE {table} RENAME TO newer; ALTER TABLE {pg_schema}.backup RENAME TO orders")
    for starting in (driver, driver.restart()):
        with pytest.raises(WentBack, match=r"is not the one that epoch 1 was written to .*restored on its own") as told:
            starting.committer.verify_applied(last, None)
    assert "epochsink accept CHECKPOINT 1 --sink NAME" in str(told.value)
    starting.committer.verify_applied(LastDone(1, "", ()), None)
    starting.committer.verify_applied(last, None)
    starting.run(2, orders(2))
    assert pg_truth.rows(table) == [(0,), (2,)]


class Query:
    """A query with one PostgreSQL sink, driven by hand over the production coordinator."""

    def __init__(self, root: Path, sink: Postgres, truth: Truth, table: str) -> None:
        self.kit = CheckpointKit(root, {"table": sink})
        self.truth, self.table = truth, table

    def record(self, number: int) -> None:
        """Play foreachBatch for an epoch with one row."""
        assert self.kit.coordinator.settle(number) is Plan.WRITE
        self.kit.record(number, {"table": orders(number)})

    def run(self, number: int) -> None:
        self.record(number)
        self.kit.decide(number)
        assert self.kit.coordinator.commit_decided()

    @property
    def participant(self) -> Participant:
        """The sink's participant."""
        (found,) = self.kit.participants
        return found

    def commit_and_die(self, number: int) -> None:
        """Commit an epoch as a driver that is killed before the ledger says that it is done."""
        self.kit.decide(number)
        prepared = self.kit.history().epochs[number]
        epoch, share = Epoch(number, prepared.attempt), prepared.shares["table"]
        rows = self.kit.spool.rows(self.kit.coordinator.identity("table"), epoch, share.tasks, share.files)
        for verdict in self.participant.commit(epoch, {"table": Ballot(share.parts, rows)})["table"]:
            assert verdict.outcome is Outcome.COMMITTED

    def start(self) -> None:
        self.kit.coordinator = self.kit.start()

    def accept(self, epoch: str) -> None:
        told = CliRunner().invoke(app, ["accept", str(self.kit.root), epoch, "--sink", "table", "--yes"])
        assert told.exit_code == 0, told.output

    def ids(self) -> list[int]:
        return [number for (number,) in self.truth.rows(self.table)]


@pytest.fixture
def make_query(postgres: PostgresService, pg_schema: str, pg_truth: Truth, tmp_path: Path) -> Iterator[MakeQuery]:
    made = []

    def make(table: str, **options: Any) -> Query:
        sink = Postgres(options.pop("dsn", postgres.dsn), table=table, marker_schema=pg_schema, **options)
        made.append(Query(tmp_path / "checkpoint", sink, pg_truth, table))
        return made[-1]

    yield make
    for query in made:
        query.kit.close()


@pytest.mark.parametrize("mode", MODES)
def test_markers_lost_before_the_first_epoch_is_done_double_no_row(
    mode: dict[str, Any], table: str, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    query = make_query(table, **mode)
    query.record(0)
    query.commit_and_die(0)
    pg_truth.execute(f"DROP TABLE {pg_schema}.marker")
    with pytest.raises(WentBack, match=r"sink 'table': .* has no marker of this query any more") as told:
        query.start()
    assert "epochsink accept CHECKPOINT 0 --sink table" in told.value.hint
    assert query.ids() == [0]
    query.accept("0")
    assert query.participant.check("table", orders(0).schema) == []  # makes the marker table again
    query.start()
    query.run(1)
    assert query.ids() == [0, 1]


def test_a_target_without_the_first_epoch_gets_it_once_that_is_said(
    table: str, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    """Restored from a backup that was made before the query began."""
    query = make_query(table)
    query.record(0)
    query.commit_and_die(0)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    pg_truth.execute(f"DELETE FROM {table}")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="no marker of this query any more") as told:
        query.start()
    assert "epochsink accept CHECKPOINT none --sink table" in told.value.hint
    query.accept("none")
    query.start()
    assert query.ids() == [0]
    query.run(1)
    assert query.ids() == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_markers_lost_while_an_epoch_is_applied_and_not_done_double_no_row(
    mode: dict[str, Any], table: str, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    query = make_query(table, **mode)
    query.run(0)
    query.record(1)
    query.commit_and_die(1)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="no marker of this query any more"):
        query.start()
    query.accept("1")
    query.start()
    query.run(2)
    assert query.ids() == [0, 1, 2]


def test_a_seal_that_a_failover_has_lost_beside_rows_of_an_epoch_that_is_not_done_is_made_again(
    table: str, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    """The seal was committed before the failover, a task's rows after it, and then the driver died."""
    query = make_query(table, atomic=False)
    query.run(0)
    query.record(1)
    query.commit_and_die(1)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker WHERE epoch = 1 AND part = 'all'")  # noqa: S608 - our own names
    query.start()
    query.run(2)
    assert query.ids() == [0, 1, 2]


def test_a_mark_of_joining_that_is_lost_before_anything_was_committed_is_left_again(
    table: str, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    query = make_query(table)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    query.start()
    query.record(0)
    query.commit_and_die(0)
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="no marker of this query any more"):
        query.start()
    assert query.ids() == [0]


def test_a_database_restored_from_a_dump_is_another_one_until_it_is_accepted(
    postgres: PostgresService, pg_schema: str, pg_truth: Truth, make_query: MakeQuery
) -> None:
    """Its markers came along, and agree: only what the server says of itself tells the copy from the original."""
    old, new = f"{pg_schema}_old", f"{pg_schema}_new"
    pg_truth.execute(f"CREATE DATABASE {old}")
    dsn = postgres.dsn.rpartition("/")[0] + f"/{new}"
    pg_truth.execute(f"ALTER DATABASE {old} RENAME TO {new}")
    own = Truth(dsn)
    own.execute("CREATE TABLE orders (id bigint)")
    query = make_query("orders", dsn=dsn)
    query.truth = own
    query.run(0)
    own.close()
    query.kit.close()
    pg_truth.execute(f"ALTER DATABASE {new} RENAME TO {old}")
    pg_truth.execute(f"CREATE DATABASE {new} TEMPLATE {old}")
    try:
        with pytest.raises(WentBack, match="restored from a dump or upgraded by pg_upgrade") as told:
            query.start()
        assert "epochsink accept CHECKPOINT 0 --sink table" in told.value.hint
        query.accept("0")
        query.start()
        query.run(1)
        query.start()
        assert query.ids() == [0, 1]
    finally:
        own.close()
        query.kit.close()
        for database in (old, new):
            pg_truth.execute(f"DROP DATABASE {database} WITH (FORCE)")
