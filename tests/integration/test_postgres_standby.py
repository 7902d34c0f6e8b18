"""A synchronous standby that is away: PostgreSQL waits for it without end, we for a while, and say so."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import Driver, Truth
from waiting import wait_until

from epochsink import Postgres
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.postgres import commit, sessions
from epochsink.postgres.database import Database
from epochsink.sink import LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fix_services import PrivatePostgres
    from streams import Stream

    from epochsink_devkit.services import PostgresService

TIMEOUT = 1.0
PREPARED = pytest.param({"commit": "prepared"}, id="prepared")
STAGED = pytest.param({"commit": "staged"}, id="staged")
BY_TASK = pytest.param({"atomic": False}, id="by-task")


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


class Primary:
    """A server whose synchronous standby goes away when it is told so; by and by its sessions hear of that."""

    def __init__(self, server: PostgresService) -> None:
        self.server = server
        self.truth = Truth(server.dsn)
        self.truth.execute("CREATE TABLE orders (id bigint)")

    def lose_standby(self) -> None:
        """Return once commits wait for it: what SHOW says, the process that decides that may read much later."""
        self._set("synchronous_standby_names = 'away'")
        self.truth.execute("SET synchronous_commit = local")
        wait_until(self._commits_wait, "a commit waits for the standby")

    def _commits_wait(self) -> bool:
        found: list[tuple[Any, ...]] = []

        def look() -> bool:
            found[:] = self.truth.execute(*asked)
            return bool(found)

        with closing(psycopg.connect(self.server.dsn, autocommit=True)) as probe:
            probe.pgconn.send_query(b"SELECT pg_logical_emit_message(true, 'probe', '')")
            query = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s AND query <> '' AND wait_event = ANY (%s)"
            asked = query, probe.info.backend_pid, ["ClientRead", "SyncRep"]
            wait_until(look, "the probe has committed, or waits")
            self.truth.execute("SELECT pg_terminate_backend(%s)", probe.info.backend_pid)
        return found == [("SyncRep",)]

    def regain_standby(self) -> None:
        self._set("synchronous_standby_names = ''")
        wait_until(lambda: not self._commits_wait(), "no commit waits any more")

    def sync(self, fsync: str) -> None:
        self._set(f"fsync = {fsync}")

    def _set(self, setting: str) -> None:
        self.truth.execute(f"ALTER SYSTEM SET {setting}")
        self.truth.execute("SELECT pg_reload_conf()")
        name, value = setting.split(" = ")
        wait_until(lambda: self.truth.execute(f"SHOW {name}") == [(value.strip("'"),)], setting)

    def driver(self, **options: Any) -> Driver:
        return Driver(Postgres(self.server.dsn, table="orders", timeout=TIMEOUT, **options))


@pytest.fixture
def primary(private_postgres: PrivatePostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Primary]:
    monkeypatch.setattr(sessions, "WATCH_SECONDS", 0.2)
    made = Primary(private_postgres())
    yield made
    made.regain_standby()
    made.sync("on")
    made.truth.close()


@pytest.fixture
def soon(primary: Primary) -> Iterator[None]:  # noqa: ARG001 - the server's start does not count
    """Expect the test to end in time: before, it waited for ever."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 60 * TIMEOUT


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("mode", [PREPARED, STAGED, BY_TASK])
def test_a_prepare_gives_a_standby_up_that_is_away(
    mode: dict[str, Any], primary: Primary, caplog: pytest.LogCaptureFixture
) -> None:
    """Check, joining and the look at the markers do not wait for it, nor does the sweep."""
    primary.lose_standby()
    with closing(primary.driver(**mode)) as driver:
        assert driver.committer.check(orders(1).schema) == []
        driver.committer.join()
        driver.committer.verify_applied(None, None)
        with pytest.raises(PrepareFailed, match=r"has waited for a synchronous standby for [1-9]\d* s") as caught:
            driver.prepare(0, orders(1))
        assert "synchronous_standby_names = 'away'" in caught.value.message
        assert "take it out of synchronous_standby_names" in caught.value.hint
        assert caught.value.may_pass
        assert "waits for a synchronous standby (wait event SyncRep)" in caplog.text
        driver.committer.abort_orphans([])
        assert primary.truth.prepared() == primary.truth.staging("epochsink") == []
        assert primary.truth.count("orders") == 0
        primary.regain_standby()
        driver.run(0, orders(1))
        assert primary.truth.count("orders") == 1


@pytest.mark.parametrize("mode", [PREPARED, STAGED, BY_TASK])
def test_a_server_that_syncs_no_longer_takes_no_epoch(mode: dict[str, Any], primary: Primary) -> None:
    """A reload changes it between the check and the vote: what it then acknowledges, a power failure may lose."""
    with closing(primary.driver(**mode)) as driver:
        assert driver.committer.check(orders(1).schema) == []
        driver.run(0, orders(1))
        primary.sync("off")
        with pytest.raises(PrepareFailed, match="the server has fsync = off") as caught:
            driver.prepare(1, orders(2))
        assert "ALTER SYSTEM SET fsync = on" in caught.value.hint
        assert not caught.value.may_pass
        assert "fsync = off" in driver.committer.check(orders(1).schema)[0]
        primary.sync("on")
        driver.committer.abort_orphans([])
        driver.run(1, orders(2))
        assert primary.truth.rows("orders") == [(1,), (2,)]


def test_staged_rows_are_not_merged_by_a_server_that_syncs_no_longer(primary: Primary) -> None:
    """The epoch is decided by then: it stays recorded, and is committed once the setting is back."""
    with closing(primary.driver(commit="staged")) as driver:
        assert driver.committer.check(orders(1).schema) == []
        written, parts = driver.prepare(0, orders(1))
        primary.sync("off")
        with pytest.raises(PrepareFailed, match="fsync = off") as caught:
            driver.commit(written, parts)
        assert "the epoch stays recorded" in caught.value.hint
        assert primary.truth.count("orders") == 0
        primary.sync("on")
        assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
        assert primary.truth.rows("orders") == [(1,)]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("mode", [PREPARED, STAGED, BY_TASK])
def test_a_commit_that_gives_a_standby_up_is_unknown_and_never_aborted(
    mode: dict[str, Any], primary: Primary, caplog: pytest.LogCaptureFixture
) -> None:
    """It has happened on this server: to prepare its rows again would double them."""
    with closing(primary.driver(**mode)) as driver:
        assert driver.committer.check(orders(1).schema) == []
        written, parts = driver.prepare(0, orders(1), orders(2))
        primary.lose_standby()
        for verdict in driver.commit(written, parts):
            assert verdict.outcome is Outcome.UNKNOWN
            assert "has waited for a synchronous standby" in verdict.evidence
        assert "waits for a synchronous standby (wait event SyncRep)" in caplog.text
        later = driver.restart()
        later.committer.verify_applied(None, LastDone(0, written.epoch.attempt, tuple(parts)))
        assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.COMMITTED}
        later.committer.finish(written.epoch, parts)
        assert primary.truth.rows("orders") == [(1,), (2,)]


@pytest.mark.usefixtures("soon")
def test_transactions_committed_side_by_side_give_a_standby_up_once(primary: Primary) -> None:
    with closing(primary.driver(atomic=False)) as driver:
        assert driver.committer.check(orders(1).schema) == []
        written, parts = driver.prepare(0, *(orders(number) for number in range(32)))
        primary.lose_standby()
        verdicts = driver.committer.commit_all(written.epoch, parts, written.rows)
        # each session has given one up, which is found applied; the next one is waited for, and no other after it
        assert [verdict.outcome for verdict in verdicts].count(Outcome.COMMITTED) <= 32 // commit.WORTH_A_SESSION
        assert verdicts[-1].outcome is Outcome.UNKNOWN
        primary.regain_standby()
        assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
        assert primary.truth.count("orders") == 32


@pytest.mark.parametrize("mode", [PREPARED, STAGED])
def test_a_standby_that_comes_back_in_time_is_waited_for(mode: dict[str, Any], primary: Primary) -> None:
    with closing(Driver(Postgres(primary.server.dsn, table="orders", timeout=30, **mode))) as driver:
        assert driver.committer.check(orders(1).schema) == []
        written, parts = driver.prepare(0, orders(1))
        primary.lose_standby()
        back = threading.Timer(1.0, primary.regain_standby)
        back.start()
        assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
        back.join()
        assert primary.truth.count("orders") == 1


@pytest.mark.parametrize("where", ["prepare", "commit_prepared"], ids=["prepare", "commit"])
def test_a_query_stops_while_the_server_waits_for_a_standby(
    where: str, stream: Stream, primary: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start finds what has happened on the server."""
    sink = Postgres(primary.server.dsn, table="orders", select="id", timeout=2 * TIMEOUT)
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once({"table": sink}))
    wait_until(lambda: stream.done() == [0], "the first epoch is done")
    real = getattr(Database, where)

    def alone(*given: Any) -> None:
        primary.lose_standby()
        real(*given)

    monkeypatch.setattr(Database, where, alone)
    stream.put(range(10, 20))
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with closing(Truth(primary.server.dsn)) as truth:
        wait_until(lambda: truth.execute(waiting), "the server waits")
        began = time.monotonic()
        with suppress(OutcomeUnknown):
            query.stop()
        assert time.monotonic() - began < 30
        monkeypatch.undo()
        primary.regain_standby()
        stream.run(stream.exactly_once({"table": sink}))
        assert truth.execute("SELECT count(*), count(DISTINCT id) FROM orders") == [(20, 20)]
