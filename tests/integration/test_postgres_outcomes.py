"""Committed, aborted or unknown: what is concluded when an answer is lost, late, or says that something is gone.

After each two-phase step the server is asked for the truth from another session, and the epoch is finished by a
committer that knows nothing but the ledger's part.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from family_tables import FamilyTables
from fix_postgres import Driver, ListedRows, Truth, as_user, gids, ranked, tables
from waiting import wait_until

from epochsink.errors import ConfigurationError, PrepareFailed, RowsRejected, SpoolMissing, WentBack
from epochsink.identity import PreparedName
from epochsink.postgres import Postgres, incoming, marker_table, prepared_transaction, sessions
from epochsink.postgres import commit as module
from epochsink.postgres.committer import PostgresCommitter
from epochsink.postgres.database import Database
from epochsink.postgres.server import Connection, Server
from epochsink.postgres.session import Session
from epochsink.postgres.staging import DELETED
from epochsink.sink import Epoch, LastDone, Outcome
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_postgres import MakeDriver, Written
    from fix_services import PrivatePostgres

    from epochsink.sink import Committable

WHOLE = [pytest.param({"commit": "prepared"}, id="prepared"), pytest.param({"commit": "staged"}, id="staged")]
BY_TASK = pytest.param({"atomic": False}, id="by-task")
GIDS = [WHOLE[0], BY_TASK]
MODES = [*WHOLE, BY_TASK]


def orders(*ids: int, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([f"{note}{i}" for i in ids])})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    """Have no key: a row applied twice would show."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint, note text)")
    return f"{pg_schema}.orders"


def impatient(driver: Driver, retry_seconds: float) -> OneSink:
    """Return another committer of the driver's sink, which repeats what fails for this long."""
    return OneSink(PostgresCommitter({driver.identity.sink: driver.sink}, retry_seconds))


def outcomes(driver: Driver, written: Written, parts: list[Committable]) -> set[Outcome]:
    return {verdict.outcome for verdict in driver.commit(written, parts)}


@pytest.mark.parametrize("mode", GIDS)
def test_a_replay_keeps_the_options_that_the_epoch_was_written_with(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The start that prepares it again has another table, no key and no deletes: the epoch's own are recorded."""
    table, other = f"{pg_schema}.orders", f"{pg_schema}.elsewhere"
    for name, key in ((table, "PRIMARY KEY"), (other, "")):
        pg_truth.execute(f"CREATE TABLE {name} (id bigint {key}, note text)")
    pg_truth.execute(f"INSERT INTO {table} VALUES (1, 'old'), (2, 'old')")  # noqa: S608 - our own names
    rows = orders(1, 2, 3).append_column(DELETED, pa.array([False, True, False]))
    driver = pg_driver(table, rows, key="id", delete_when="note = ''", **mode)
    written, parts = driver.prepare(0, rows)
    for gid in pg_truth.prepared():
        pg_truth.execute(f"ROLLBACK PREPARED '{gid}'")
    later = driver.restart(Postgres(pg_truth.dsn, table=other, marker_schema=pg_schema, **mode))
    assert outcomes(later, written, parts) == {Outcome.ABORTED}
    replayed = [later.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex) for part in parts]
    assert outcomes(later, written, replayed) == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "x1"), (3, "x3")]
    assert pg_truth.count(other) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_may_be_repeated_at_any_time(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """By the same committer, by a later one, and after the epoch's staging is gone."""
    driver = pg_driver(table, orders(1), **mode)
    written, parts = driver.prepare(0, orders(1, 2), orders(3))
    for again in (driver, driver, driver.restart()):
        assert outcomes(again, written, parts) == {Outcome.COMMITTED}
    driver.committer.finish(written.epoch, parts)
    assert outcomes(driver.restart(), written, parts) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_vote_may_be_repeated(mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    driver = pg_driver(table, orders(1), **mode)
    written = driver.write(0, orders(1), orders(2))
    assert driver.vote(written) == driver.vote(written)
    assert len(pg_truth.prepared()) == {"prepared": 1, "staged": 0}.get(mode.get("commit", ""), 3)


@pytest.mark.parametrize("mode", GIDS)
def test_what_somebody_rolled_back_is_aborted_and_replayed_from_the_spool(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    written, parts = driver.prepare(0, orders(1, 2), [orders(3), orders(4)])
    for gid in pg_truth.prepared():
        pg_truth.execute(f"ROLLBACK PREPARED '{gid}'")
    later = driver.restart()
    verdicts = later.commit(written, parts)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ABORTED}
    assert "marker is absent" in verdicts[0].evidence

    attempts = [uuid.uuid4().hex for _ in parts]
    replayed = [
        later.committer.replay(written.epoch, part, written.rows, attempt)
        for part, attempt in zip(parts, attempts, strict=True)
    ]
    assert pg_truth.count(table) == 0
    assert sorted(pg_truth.prepared()) == gids(replayed)
    assert {part["attempt"] for part in replayed} == set(attempts)

    last = later.restart()
    ended = [line for line in last.committer.abort_orphans(replayed) if "session" not in line]
    assert ended == [f"dropped staging table {table}" for table in tables(parts)]
    assert outcomes(last, written, replayed) == {Outcome.COMMITTED}
    last.committer.finish(written.epoch, replayed)
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2"), (3, "x3"), (4, "x4")]
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []


@pytest.mark.parametrize("damage", ["DROP TABLE {}", "TRUNCATE {}", "DELETE FROM {} WHERE id = 1"])
def test_staged_rows_that_are_gone_are_aborted_and_replayed(
    damage: str, table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Never merged in part."""
    driver = pg_driver(table, orders(1), commit="staged")
    written, parts = driver.prepare(0, orders(1, 2))
    pg_truth.execute(damage.format(f"{pg_schema}.{tables(parts)[0]}"))
    assert outcomes(driver, written, parts) == {Outcome.ABORTED}
    assert pg_truth.count(table) == 0
    assert driver.committer.newest() is None
    replayed = [driver.committer.replay(written.epoch, parts[0], written.rows, uuid.uuid4().hex)]
    assert outcomes(driver.restart(), written, replayed) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 2


def test_a_replay_without_a_spool_says_so_and_leaves_nothing(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1))
    written, parts = driver.prepare(0, orders(1))
    pg_truth.execute(f"ROLLBACK PREPARED '{parts[0]['gid']}'")
    with pytest.raises(SpoolMissing):
        driver.committer.replay(written.epoch, parts[0], ListedRows({}), uuid.uuid4().hex)
    assert pg_truth.prepared() == []


def test_a_vote_that_a_newer_driver_blocks_names_its_transaction_and_the_command(
    table: str, pg_driver: MakeDriver
) -> None:
    """That driver runs on another copy of the checkpoint: no sweep of this one may end what it has prepared."""
    older = pg_driver(table, orders(1), timeout=0.5)
    _, (blocking,) = older.restart().prepare(0, orders(1))
    with pytest.raises(PrepareFailed) as refused:
        older.prepare(0, orders(1))
    assert blocking["gid"] in refused.value.message
    assert "generation 2 prepared it, and this driver is generation 1" in refused.value.message
    assert f"epochsink orphans --dsn DSN --end '{blocking['gid']}'" in refused.value.hint


@pytest.mark.parametrize("mode", [{}, {"atomic": False}], ids=["another dsn", "by-task"])
def test_a_vote_that_another_sink_of_the_query_blocks_names_it_and_the_way_to_share_a_transaction(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """It would wait for the decision on its own epoch, in every attempt."""
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    other = pg_driver(table, orders(1), key="id", **mode)
    other.committer.close()
    other.identity = replace(other.identity, sink="early")
    other.committer = OneSink.of(other.sink, "early")
    other.committer.open(other.identity)
    other.committer.join()
    driver = Driver(Postgres(pg_truth.dsn, table=table, key="id", marker_schema=pg_schema, timeout=0.5))
    driver.identity = replace(driver.identity, query_id=other.identity.query_id)
    driver.committer.open(driver.identity)
    _, parts = other.prepare(0, orders(1))
    with closing(driver), closing(other.committer):
        with pytest.raises(PrepareFailed, match="it is of sink 'early' of this query") as refused:
            driver.prepare(0, orders(1))
        assert "give both atomic=True" in refused.value.hint
        assert not refused.value.may_pass
        assert sorted(pg_truth.prepared()) == gids(parts)
        other.committer.abort_orphans([])
        driver.run(0, orders(1))
    assert pg_truth.rows(table) == [(1, "x1")]


@pytest.mark.parametrize("timeout", [60.0, 1.0], ids=["by the deadline", "by lock_timeout"])
@pytest.mark.parametrize("statement", ["VACUUM FULL {}", "ALTER TABLE {} ADD COLUMN more text"])
def test_a_statement_that_rewrites_the_markers_while_an_epoch_is_prepared_is_named(
    statement: str, timeout: float, table: str, pg_schema: str, *, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """It waits for the prepared transaction, and the comparison before the commit for it: nobody would go on."""
    driver = pg_driver(table, orders(1), timeout=timeout)
    written, parts = driver.prepare(0, orders(1))
    pending = LastDone(0, written.epoch.attempt, tuple(parts))
    committer = impatient(driver, 2.0)
    committer.open(driver.identity)
    with closing(committer), closing(psycopg.connect(pg_truth.dsn, autocommit=True)) as operator:
        rewriting = threading.Thread(target=cancelled, args=(operator, statement.format(f"{pg_schema}.marker")))
        rewriting.start()
        pid = operator.info.backend_pid
        waits = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        wait_until(lambda: pg_truth.execute(waits, pid), "the statement waits")
        with pytest.raises(PrepareFailed, match=rf"by session {pid} \(postgres: (VACUUM FULL|ALTER TABLE)\)") as told:
            committer.verify_applied(None, pending)
        assert "pg_cancel_backend(PID)" in told.value.message
        assert "only while no query runs" in told.value.hint
        assert told.value.may_pass
        pg_truth.execute("SELECT pg_cancel_backend(%s)", pid)
        rewriting.join(30)
        committer.verify_applied(None, pending)
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "x1")]


def cancelled(operator: psycopg.Connection[Any], statement: str) -> None:
    with suppress(psycopg.errors.QueryCanceled):
        operator.execute(statement.encode())


@pytest.mark.parametrize("mode", MODES)
def test_what_another_attempt_applied_is_unknown(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Neither committed nor to be replayed: the evidence names both attempts."""
    driver = pg_driver(table, orders(1), **mode)
    written, parts = driver.prepare(0, orders(1))
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    stranger = uuid.uuid4().hex
    lost = dict(parts[0], attempt=stranger)
    if lost["gid"]:
        name = PreparedName.parse(lost["gid"])
        assert name is not None
        lost["gid"] = str(replace(name, attempt=stranger))
    (verdict,) = driver.commit(written, [lost])
    assert verdict.outcome is Outcome.UNKNOWN
    assert stranger in verdict.evidence
    assert written.epoch.attempt in verdict.evidence
    assert pg_truth.count(table) == 1


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_that_is_applied_already_stops_the_vote(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The checkpoint is an older copy: nothing is prepared a second time."""
    driver = pg_driver(table, orders(1), **mode)
    driver.run(0, orders(1))
    later = driver.restart()
    written = later.write(0, orders(1))
    with pytest.raises(WentBack, match="already applied"):
        later.vote(written)
    later.committer.abort_orphans([])
    assert pg_truth.prepared() == []
    assert pg_truth.count(table) == 1


def test_of_two_copies_whose_tasks_have_prepared_an_epoch_one_gets_it(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Parts of tasks have no marker in common; the seal has, so that the second vote waits, and is then refused."""
    driver = pg_driver(table, orders(1), atomic=False, timeout=1)
    driver.run(0, orders(0))
    other = driver.restart()
    ours, theirs = driver.write(1, orders(1), orders(2)), other.write(1, orders(1), orders(2))
    parts = driver.vote(ours)
    with pytest.raises(PrepareFailed, match="lock timeout"):
        other.vote(theirs)
    assert outcomes(driver, ours, parts) == {Outcome.COMMITTED}
    with pytest.raises(WentBack, match="already applied"):
        other.vote(theirs)
    other.committer.abort_orphans([])
    assert pg_truth.prepared() == []
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in range(3)]


def test_a_vote_that_waits_for_the_seal_of_a_later_driver_names_it(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Its tasks hold locks on the table too, and are not what it waits for."""
    driver = pg_driver(table, orders(1), atomic=False, timeout=1)
    other = driver.restart()
    ours, theirs = driver.write(0, orders(1)), other.write(0, orders(1))
    seal, *_ = other.vote(theirs)
    with pytest.raises(
        PrepareFailed, match=f"prepared transaction '{seal['gid']}' has held locks on the markers"
    ) as told:
        driver.vote(ours)
    assert "this checkpoint is the older copy" in told.value.message
    assert f"--end '{seal['gid']}'" in told.value.hint
    other.committer.abort_orphans([])
    assert pg_truth.prepared() == []


def test_a_seal_that_is_gone_is_prepared_again_before_a_task_is_committed(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """What is still prepared waits for it, and stays as it is. Nothing is, while the epoch before is missing."""
    driver = pg_driver(table, orders(1), atomic=False, timeout=1)
    written, parts = driver.prepare(0, orders(0))
    driver.commit(written, parts)
    last = LastDone(0, written.epoch.attempt, tuple(parts))
    written, parts = driver.prepare(1, orders(1), orders(2), orders(3))
    for part in parts[0], parts[3]:
        pg_truth.execute(f"ROLLBACK PREPARED '{part['gid']}'")
    found = driver.committer.commit_all(written.epoch, parts, written.rows, last)
    assert {verdict.outcome for verdict in found} == {Outcome.ABORTED}
    assert "waits for the seal" in found[1].evidence
    assert "marker is absent" in found[3].evidence
    assert sorted(pg_truth.prepared()) == gids(parts[1:3])

    def again(part: Committable) -> Committable:
        return driver.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex, last)

    marker = f"{pg_schema}.marker"
    pg_truth.execute(f"UPDATE {marker} SET epoch = 7 WHERE epoch = 0 AND part = 'all'")  # noqa: S608 - our own names
    with pytest.raises(WentBack):
        again(parts[0])
    pg_truth.execute(f"UPDATE {marker} SET epoch = 0 WHERE epoch = 7")  # noqa: S608 - our own names
    replayed = [again(part) for part in parts]
    assert replayed[1:3] == parts[1:3]
    assert sorted(pg_truth.prepared()) == gids(replayed)
    found = driver.committer.commit_all(written.epoch, replayed, written.rows, last)
    assert {verdict.outcome for verdict in found} == {Outcome.COMMITTED}
    driver.committer.verify_applied(LastDone(1, written.epoch.attempt, tuple(replayed)), None)
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in range(4)]


def test_no_task_is_committed_while_its_seal_is_another_attempts(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Unknown for all of the epoch: it stays recorded, and nothing of it is shown."""
    driver = pg_driver(table, orders(1), atomic=False)
    written, parts = driver.prepare(0, *(orders(number) for number in range(20)))
    driver.commit(written, parts[:1])
    pg_truth.execute(f"UPDATE {pg_schema}.marker SET attempt = 'other' WHERE part = 'all'")  # noqa: S608 - our own names
    found = driver.committer.commit_all(written.epoch, parts, written.rows)
    assert {verdict.outcome for verdict in found} == {Outcome.UNKNOWN}
    assert pg_truth.count(table) == 0


@pytest.mark.parametrize("mode", MODES)
def test_two_drivers_that_commit_at_once_apply_an_epoch_once(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """One of them finds the transaction busy or gone, or waits for the other's marker: both say committed."""
    driver = pg_driver(table, orders(1), **mode)
    for number in range(5):
        written, parts = driver.prepare(number, orders(number))
        drivers = [driver.restart() for _ in range(3)]
        found: list[set[Outcome]] = []
        threads = [
            threading.Thread(target=lambda each=each: found.append(outcomes(each, written, parts)))  # noqa: B023 - joined below
            for each in drivers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [{Outcome.COMMITTED}] * 3
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in range(5)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_lost_connection_during_commit_is_repeated(
    moment: str,
    mode: dict[str, Any],
    table: str,
    pg_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    *,
    pg_truth: Truth,
) -> None:
    """Whether the server had done it or not."""
    driver = pg_driver(table, orders(1), **mode)
    written, parts = driver.prepare(0, orders(1))
    name = "commit" if "staged" in mode.values() else "commit_prepared"
    losses = cut_once(monkeypatch, name, moment)
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert losses == [moment]
    assert pg_truth.rows(table) == [(1, "x1")]
    assert pg_truth.prepared() == []


def test_many_prepared_transactions_are_committed_in_several_sessions(
    table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is gone, and one session is lost on its way: those are left to who asks one by one."""
    driver = pg_driver(table, orders(1), atomic=False)
    written, parts = driver.prepare(0, *(orders(number) for number in range(24)))
    pg_truth.execute(f"ROLLBACK PREPARED '{parts[5]['gid']}'")
    gid_of = {index: part["gid"] for index, part in enumerate(parts) if index}
    opened: list[str] = []
    connect = Server.connect

    def counted(server: Server, name: str, retry_seconds: float = 0.0) -> Any:
        opened.append(name)
        return connect(server, name, retry_seconds)

    monkeypatch.setattr(Server, "connect", counted)
    losses = cut_once(monkeypatch, "commit_prepared", "after")
    server = Server.of(driver.sink)
    session = Session(partial(Database.connect, server), "epochsink")
    committed = module.commit_side_by_side(server, session, gid_of, 30)
    assert losses == ["after"]
    assert len(opened) == 3
    assert 5 not in committed
    assert len(committed) == 22, committed
    found = [verdict.outcome for verdict in driver.commit(written, parts)]
    assert [index for index, outcome in enumerate(found) if outcome is not Outcome.COMMITTED] == [5]
    assert sorted(pg_truth.rows(table)) == [(n, f"x{n}") for n in range(24) if n != 4]
    assert pg_truth.prepared() == []
    few = {index: gid_of[index] for index in range(1, 4)}
    assert module.commit_side_by_side(server, session, few, 30) == set()


def cut_once(monkeypatch: pytest.MonkeyPatch, name: str, moment: str) -> list[str]:
    """Terminate the session before or after the real command, once; the caller sees a dead connection."""
    real: Callable[..., None] = getattr(Database, name)
    losses: list[str] = []

    def lossy(database: Database, *rest: Any) -> None:
        if losses:
            return real(database, *rest)
        losses.append(moment)
        if moment == "after":
            real(database, *rest)
        database.connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        raise AssertionError("the session survived its termination")

    monkeypatch.setattr(Database, name, lossy)
    return losses


def test_a_busy_prepared_transaction_is_waited_for(
    table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session is in the middle of finishing it (55000)."""
    driver = pg_driver(table, orders(1))
    written, parts = driver.prepare(0, orders(1))
    real = Database.commit_prepared
    turns: list[str] = []

    def busy(connection: Any, gid: str) -> None:
        turns.append(gid)
        if len(turns) < 3:
            raise psycopg.errors.ObjectNotInPrerequisiteState("prepared transaction with identifier is busy")
        real(connection, gid)

    monkeypatch.setattr(Database, "commit_prepared", busy)
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert len(turns) == 3
    assert pg_truth.count(table) == 1


def test_a_server_killed_between_vote_and_commit_keeps_every_epoch(private_postgres: PrivatePostgres) -> None:
    """While it is down the outcome is unknown; afterwards each epoch commits, whatever the mode.

    The server has on disk what a vote has waited for, and nothing else: its WAL writer is slow. The rows of an epoch
    that had not voted are in the spool, and it votes afterwards.
    """
    server = private_postgres(wal_writer_delay="10s", wal_writer_flush_after="1GB")
    # the staged one last: whatever is prepared after its rows are committed takes these to the disk with it
    modes: list[dict[str, Any]] = [{"commit": "prepared"}, {"atomic": False}, {"commit": "staged"}]
    drivers = [Driver(Postgres(server.dsn, table=f"orders_{index}", **mode)) for index, mode in enumerate(modes)]
    with closing(Truth(server.dsn)) as truth:
        for index, driver in enumerate(drivers):
            truth.execute(f"CREATE TABLE orders_{index} (id bigint, note text)")
            assert driver.committer.check(orders(1).schema) == []
        unvoted = drivers[0].write(1, orders(4, 5))
        pending = [driver.prepare(0, orders(1, 2), orders(3)) for driver in drivers]
    server.kill()

    for driver, (written, parts) in zip(drivers, pending, strict=True):
        with closing(impatient(driver, 0.3)) as hasty:
            hasty.open(driver.identity)
            verdict = hasty.commit(written.epoch, parts[0], written.rows)
            assert verdict.outcome is Outcome.UNKNOWN
            assert str(server.port) in verdict.evidence
            with pytest.raises(PrepareFailed):
                hasty.newest()

    server.start()
    with closing(Truth(server.dsn)) as truth:
        assert [truth.count(f"orders_{index}") for index in range(3)] == [0, 0, 0]
        for driver, (written, parts) in zip(drivers, pending, strict=True):
            assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
            driver.committer.finish(written.epoch, parts)
        assert outcomes(drivers[0], unvoted, drivers[0].vote(unvoted)) == {Outcome.COMMITTED}
        assert [truth.count(f"orders_{index}") for index in range(3)] == [5, 3, 3]
        assert truth.prepared() == truth.staging("epochsink") == []
    for driver in drivers:
        driver.close()


def test_what_is_done_outlives_a_crash_though_the_role_commits_asynchronously(
    private_postgres: PrivatePostgres,
) -> None:
    """With synchronous_commit=off, and a WAL writer that is slow, a commit would be lost that we called done."""
    server = private_postgres(wal_writer_delay="10s", wal_writer_flush_after="1GB")
    with closing(Truth(server.dsn)) as truth:
        truth.execute("ALTER DATABASE postgres SET synchronous_commit = off")
        truth.execute("CREATE TABLE orders (id bigint, note text)")
        truth.execute("CHECKPOINT")
    driver = Driver(Postgres(server.dsn, table="orders", commit="staged"))
    assert driver.committer.check(orders(1).schema) == []
    written, parts = driver.prepare(0, orders(1))
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    server.kill()
    server.start()
    with closing(Truth(server.dsn)) as truth:
        assert truth.count("orders") == 1
    assert driver.committer.newest() == 0
    driver.close()


def test_a_frozen_server_makes_the_outcome_unknown_in_bounded_time(private_postgres: PrivatePostgres) -> None:
    """Its kernel still acknowledges everything, so no time-out of TCP strikes."""
    server = private_postgres()
    truth = Truth(server.dsn)
    truth.execute("CREATE TABLE orders (id bigint, note text)")
    driver = Driver(Postgres(server.dsn, table="orders", options={"connect_timeout": 2}))
    assert driver.committer.check(orders(1).schema) == []
    written, parts = driver.prepare(0, orders(1))
    hasty = impatient(driver, 1.0)
    hasty.open(driver.identity)
    assert hasty.newest() is None
    server.pause()
    try:
        assert hasty.commit(written.epoch, parts[0], written.rows).outcome is Outcome.UNKNOWN
    finally:
        server.resume()
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert truth.count("orders") == 1
    hasty.close()
    driver.close()
    truth.close()


def test_a_server_that_freezes_at_the_commit_itself_is_given_up(
    private_postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered the look at the session just before."""
    server = private_postgres()
    with closing(Truth(server.dsn)) as truth:
        truth.execute("CREATE TABLE orders (id bigint, note text)")
    driver = Driver(Postgres(server.dsn, table="orders", options={"connect_timeout": 2}))
    assert driver.committer.check(orders(1).schema) == []
    written, (part,) = driver.prepare(0, orders(1))
    real = Database.commit_prepared
    # a commit that waits for the end of this is one without a limit
    thaw = threading.Timer(60, server.resume)

    def frozen(connection: Any, gid: str) -> None:
        server.pause()
        thaw.start()
        real(connection, gid)

    monkeypatch.setattr(Database, "commit_prepared", frozen)
    with closing(impatient(driver, 1.0)) as hasty:
        hasty.open(driver.identity)
        verdict = hasty.commit(written.epoch, part, written.rows)
    thaw.cancel()
    server.resume()
    assert verdict.outcome is Outcome.UNKNOWN
    monkeypatch.undo()
    assert outcomes(driver.restart(), written, [part]) == {Outcome.COMMITTED}
    driver.close()


def test_rows_that_wait_for_the_decision_outlive_a_crash_of_the_server(private_postgres: PrivatePostgres) -> None:
    """Nothing else makes the server's log durable: its writer is slow, and no checkpoint is made."""
    server = private_postgres(wal_writer_delay="10s", wal_writer_flush_after="1GB")
    with closing(Truth(server.dsn)) as truth:
        truth.execute("CREATE TABLE orders (id bigint, note text)")
    driver = Driver(Postgres(server.dsn, table="orders", commit="staged"))
    assert driver.committer.check(orders(1).schema) == []
    written, parts = driver.prepare(0, orders(1), orders(2))
    server.kill()
    server.start()
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    with closing(Truth(server.dsn)) as truth:
        assert truth.rows("orders") == [(1, "x1"), (2, "x2")]
    driver.close()


def test_a_target_set_back_between_the_comparison_and_the_merge_takes_no_rows(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The transaction that merges looks at the markers again."""
    driver = pg_driver(table, orders(1), commit="staged")
    first, done = driver.prepare(0, orders(1))
    assert outcomes(driver, first, done) == {Outcome.COMMITTED}
    written, (part,) = driver.prepare(1, orders(2))
    after = LastDone(0, first.epoch.attempt, tuple(done))
    for _ in range(2):
        assert driver.committer.commit(written.epoch, part, written.rows, after).outcome is Outcome.COMMITTED
    after = LastDone(1, written.epoch.attempt, (part,))
    written, (part,) = driver.prepare(2, orders(3))
    pg_truth.execute(f"DELETE FROM {table}; DELETE FROM {pg_schema}.marker WHERE epoch = 1")  # noqa: S608 - our own names
    with pytest.raises(WentBack):
        driver.committer.commit(written.epoch, part, written.rows, after)
    assert pg_truth.count(table) == 0
    assert driver.committer.newest() == 0


def test_a_transaction_that_has_failed_is_neither_committed_nor_prepared(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The server answers COMMIT and PREPARE TRANSACTION of it with ROLLBACK, and with no error."""
    driver = pg_driver(table, orders(1))
    name = PreparedName.of(driver.identity, Epoch(0, uuid.uuid4().hex), "all")
    with closing(Server.of(driver.sink).connect("epochsink")) as connection:
        for end in (prepared_transaction.commit, lambda of: prepared_transaction.prepare(of, name)):
            prepared_transaction.begin(connection)
            with pytest.raises(psycopg.errors.UndefinedColumn):
                connection.execute(f"INSERT INTO {table} VALUES (missing)".encode())  # noqa: S608 - our own name
            with pytest.raises(PrepareFailed, match="with ROLLBACK"):
                end(connection)
    assert pg_truth.prepared() == []


def test_a_session_that_died_while_idle_is_replaced(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    driver = pg_driver(table, orders(1))
    driver.run(0, orders(1))
    pg_truth.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'epochsink:%'"
    )
    driver.run(1, orders(2))
    assert pg_truth.count(table) == 2


def test_markers_are_not_looked_for_in_another_schema(table: str, pg_driver: MakeDriver, pg_schema: str) -> None:
    """There an applied epoch would seem lost, and be applied again."""
    driver = pg_driver(table, orders(1))
    assert driver.committer.join().origin["schema"] == pg_schema
    moved = Postgres("host=127.0.0.1", table=table, marker_schema="other")
    with pytest.raises(ConfigurationError, match="markers are in"):
        OneSink.of(moved, driver.identity.sink).open(replace(driver.identity, origin=driver.committer.join().origin))


def test_a_row_that_breaks_a_constraint_leaves_a_staged_epoch_pending(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The decision has fallen, so nothing may be dropped: the error repeats until somebody mends the target."""
    driver = pg_driver(table, orders(1), commit="staged")
    written, parts = driver.prepare(0, orders(1, 1))
    pg_truth.execute(f"ALTER TABLE {table} ADD CONSTRAINT one_of_each UNIQUE (id)")
    for each in (driver, driver.restart()):
        with pytest.raises(RowsRejected, match="one_of_each"):
            each.commit(written, parts)
    assert pg_truth.count(table) == 0
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT one_of_each")
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 2


def test_a_staged_epoch_is_merged_as_it_was_recorded(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Even if the query was started again with another configuration meanwhile."""
    pg_truth.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    driver = pg_driver(table, orders(1), commit="staged", key="id", order_by="note")
    rows = [orders(1, note=note) for note in "ab"]
    written, parts = driver.prepare(0, *(ranked(one, one["note"]) for one in rows))
    changed = Postgres(pg_truth.dsn, table=f"{table}_new", marker_schema=driver.sink.marker_schema)
    assert outcomes(driver.restart(changed), written, parts) == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "b1")]


REFUSALS = [
    ("BEGIN; LOCK TABLE {0}", "ROLLBACK", "lock timeout"),
    (
        "CREATE TRIGGER t BEFORE INSERT ON {0} EXECUTE FUNCTION {0}_no()",
        "DROP TRIGGER t ON {0}",
        "no, it says",
    ),
    (
        (
            "CREATE TRIGGER t BEFORE INSERT ON {0} EXECUTE FUNCTION {0}_slow(); "
            "ALTER DATABASE postgres SET statement_timeout = 300"
        ),
        "ALTER DATABASE postgres RESET statement_timeout; DROP TRIGGER t ON {0}",
        "statement timeout",
    ),
    (
        "INSERT INTO {0} VALUES (1, 'y'); ALTER TABLE {0} ADD CONSTRAINT e EXCLUDE (id WITH =)",
        "ALTER TABLE {0} DROP CONSTRAINT e; DELETE FROM {0}",
        "exclusion constraint",
    ),
    (
        "ALTER TABLE {0} DROP note; ALTER TABLE {0} ADD note text GENERATED ALWAYS AS (id::text) STORED",
        "ALTER TABLE {0} DROP note; ALTER TABLE {0} ADD note text",
        "generated column",
    ),
    (
        "DROP TABLE {0}; CREATE TABLE {0} (id bigint, note text) PARTITION BY LIST (id)",
        "CREATE TABLE {0}_1 PARTITION OF {0} DEFAULT",
        "no partition",
    ),
]


@pytest.mark.parametrize(("damage", "repair", "says"), REFUSALS)
def test_what_the_server_refuses_after_the_decision_is_named_and_stays_recorded(
    damage: str, repair: str, says: str, table: str, pg_driver: MakeDriver, *, pg_truth: Truth
) -> None:
    """Not called unknown: nothing was committed, and the message says why."""
    pg_truth.execute(
        f"CREATE FUNCTION {table}_no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no, it says'; END $$; "
        f"CREATE FUNCTION {table}_slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(9); END $$"
    )
    driver = pg_driver(table, orders(1), commit="staged", timeout=0.2)
    written, parts = driver.prepare(0, orders(1))
    for statement in damage.format(table).split("; "):
        pg_truth.execute(statement)
    with closing(impatient(driver, 0.5)) as hasty:
        hasty.open(driver.identity)
        with pytest.raises(PrepareFailed, match=says) as caught:
            hasty.commit(written.epoch, parts[0], written.rows)
    assert "which is decided" in caught.value.message
    assert "the next start commits it" in caught.value.hint
    pg_truth.execute(repair.format(table))
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 1


@pytest.fixture
def poor(pg_schema: str, table: str, pg_truth: Truth) -> Iterator[str]:
    """Make a user with the rights that an epoch needs, all granted by somebody else; return its connection string."""
    name, password = f"poor_{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    pg_truth.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
    pg_truth.execute(f"GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {name}")
    pg_truth.execute(f"GRANT INSERT ON {table} TO {name}")
    pg_truth.execute(marker_table.table_ddl(pg_schema).as_string())
    pg_truth.execute(f"GRANT SELECT, INSERT, DELETE ON {pg_schema}.marker TO {name}")
    yield as_user(pg_truth.dsn, name, password)
    pg_truth.execute(f"DROP OWNED BY {name}")
    pg_truth.execute(f"DROP ROLE {name}")


RIGHTS = [
    ("staged", "INSERT ON {0}.orders"),
    ("staged", "SELECT ON {0}.marker"),
    ("staged", "INSERT ON {0}.marker"),
    ("staged", "USAGE ON SCHEMA {0}"),
    ("prepared", "SELECT ON {0}.marker"),
]


@pytest.mark.parametrize(("commit", "right"), RIGHTS)
def test_a_right_that_is_taken_away_after_the_decision_is_named_and_the_query_goes_on_once_it_is_granted(
    commit: str, right: str, table: str, pg_schema: str, poor: str, *, tmp_path: Path, pg_truth: Truth
) -> None:
    """Whether it is one on the table or on the markers: the server has answered, so nothing is unknown."""
    user = psycopg.conninfo.conninfo_to_dict(poor)["user"]
    sink = {"dsn": poor, "table": table, "marker_schema": pg_schema, "commit": commit}
    query = FamilyTables(str(tmp_path / "checkpoint"), {"table": sink}, {"table": {"id": "int64", "note": "string"}})
    driver = query.driver()
    query.run(driver, 0, {"table": [{"id": 0, "note": "x"}]})
    query.prepare(driver, 1, {"table": [{"id": 1, "note": "x"}]})
    query.decide(1)
    change = right.format(pg_schema)
    pg_truth.execute(f"REVOKE {change} FROM {user}")
    with pytest.raises(PrepareFailed, match=r"decided[\s\S]*permission denied") as caught:
        driver.commit_decided()
    assert "the next start commits it" in caught.value.hint
    pg_truth.execute(f"GRANT {change} TO {user}")
    later = query.driver()
    assert later.queue.pending == ()
    query.run(later, 2, {"table": [{"id": 2, "note": "x"}]})
    query.close()
    assert pg_truth.rows(table) == [(0, "x"), (1, "x"), (2, "x")]


def test_a_lock_that_somebody_holds_for_a_while_after_the_decision_is_waited_for(
    table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a transaction of its own each time, though one wait may take no longer than ``timeout``."""
    driver = pg_driver(table, orders(1), commit="staged", timeout=0.1)
    written, parts = driver.prepare(0, orders(1))
    real = Database.merge
    refused: list[str] = []

    def merge(*given: Any, **options: Any) -> Any:
        try:
            return real(*given, **options)
        except psycopg.errors.LockNotAvailable:
            refused.append("lock timeout")
            pg_truth.execute("ROLLBACK")
            raise

    monkeypatch.setattr(Database, "merge", merge)
    pg_truth.execute("BEGIN")
    pg_truth.execute(f"LOCK TABLE {table}")
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert refused == ["lock timeout"]
    assert pg_truth.count(table) == 1


def test_a_trial_merge_finds_what_would_be_refused_after_the_decision(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    pg_truth.execute(f"ALTER TABLE {table} ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED")
    driver = pg_driver(table, orders(1), commit="staged", validate=True)
    with pytest.raises(RowsRejected, match="duplicate key"):
        driver.prepare(0, orders(1, 1))
    driver.run(0, orders(1, 2))
    assert pg_truth.count(table) == 2


@pytest.mark.parametrize("mode", WHOLE[:1])
def test_a_vote_whose_session_is_lost_is_repeated(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, pg_truth: Truth
) -> None:
    """As by a restart of the server: whether it had prepared or not."""
    for number, moment in enumerate(("before", "after")):
        driver = pg_driver(table, orders(1), **mode)
        losses = cut_once(monkeypatch, "prepare", moment)
        driver.run(0, orders(number))
        assert losses == [moment]
        monkeypatch.undo()
    assert pg_truth.rows(table) == [(0, "x0"), (1, "x1")]


def test_a_server_that_freezes_under_a_statement_is_given_up(
    private_postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only takes long is not."""
    monkeypatch.setattr(sessions, "WATCH_SECONDS", 0.1)
    postgres = private_postgres()
    server = Server.of(Postgres(postgres.dsn, table="t", options={"connect_timeout": 2}))
    with closing(server.connect("epochsink")) as connection:
        with sessions.watched(connection, server):
            connection.execute("SELECT pg_sleep(1)")
        postgres.pause()
        try:
            with pytest.raises(psycopg.OperationalError), sessions.watched(connection, server):
                connection.execute("SELECT 1")
        finally:
            postgres.resume()


def test_votes_and_prepares_end_when_the_server_freezes_and_outlive_its_restart(
    private_postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "WATCH_SECONDS", 0.1)
    server = private_postgres()
    with closing(Truth(server.dsn)) as truth:
        truth.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    driver = Driver(Postgres(server.dsn, table="orders", key="id", options={"connect_timeout": 2}))
    assert driver.committer.check(orders(1).schema) == []

    def at(where: Any, name: str, act: Callable[[], object]) -> None:
        real, waiting = getattr(where, name), [act]

        def acting(*given: Any, **options: Any) -> Any:
            if waiting:
                waiting.pop()()
            return real(*given, **options)

        monkeypatch.setattr(where, name, acting)

    written = driver.write(0, orders(1))
    with closing(impatient(driver, 0.5)) as hasty:
        hasty.open(driver.identity)
        at(incoming, "commit", server.pause)
        with pytest.raises(PrepareFailed):
            hasty.vote(written.epoch, written.committables, written.rows)
        server.resume()
        at(Database, "merge", server.pause)
        with pytest.raises(PrepareFailed):
            hasty.vote(written.epoch, written.committables, written.rows)
        server.resume()
    at(Database, "merge", server.restart)
    parts = driver.vote(written)
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    with closing(Truth(server.dsn)) as truth:
        assert truth.count("orders") == 1
    driver.close()


def test_what_a_start_writes_is_committed_with_the_request_that_writes_it(
    table: str, pg_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that outlives its driver between two requests holds its row, and every later start waited for it."""
    real, states = Connection.execute, []

    def execute(connection: Connection, *given: Any, **named: Any) -> Any:
        cursor = real(connection, *given, **named)
        states.append(connection.info.transaction_status)
        return cursor

    monkeypatch.setattr(Connection, "execute", execute)
    driver = pg_driver(table, orders(1))
    states.clear()
    driver.committer.join()
    driver.committer.verify_applied(None, None)
    assert set(states) == {psycopg.pq.TransactionStatus.IDLE}


def test_sessions_outlive_a_closed_connection(pg_truth: Truth) -> None:
    session = Session(partial(Database.connect, Server.of(Postgres(pg_truth.dsn, table="t"))), "epochsink")
    first = session.database()
    first.close()
    assert session.database() is not first
    assert session.database() is session.database()
    session.close()


def test_an_unknown_epoch_is_none_of_ours(table: str, pg_driver: MakeDriver) -> None:
    driver = pg_driver(table, orders(1))
    assert driver.committer.newest() is None
    assert driver.committer.abort_orphans([]) == []
