"""A cluster of two servers: sessions that reach a standby, or the old primary, conclude nothing from what it lacks."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import Driver, Truth, gids

from epochsink import Postgres
from epochsink.errors import PrepareFailed, WentBack
from epochsink.sink import LastDone, Outcome, comparing
from epochsink_devkit.services import LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_postgres import Written

    from epochsink.sink import Committable
    from epochsink.testing.sink_rig import OneSink


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


def last_done(written: Written, parts: list[Committable]) -> LastDone:
    return LastDone(written.epoch.number, written.epoch.attempt, tuple(parts))


def compare_alone(committer: OneSink, done: LastDone, pending: LastDone | None) -> None:
    """Compare the table with the ledger as `epochsink audit` does."""
    with comparing():
        committer.verify_applied(done, pending)


class Standby(LocalPostgres):
    """A hot standby that has everything up to the moment at which it was made, and receives nothing more."""

    def __init__(self, primary: LocalPostgres) -> None:
        super().__init__()
        self._primary = primary

    def _prepare(self) -> None:
        """Copy a server that was shut down: its end is a checkpoint, from which the copy is consistent at once."""
        self._primary.stop()
        subprocess.run(["/bin/cp", "-a", str(self._primary.data), str(self.data)], check=True)
        shutil.copy2(self._primary.home / "password", self.home / "password")
        signal_file = self.data / "standby.signal"
        signal_file.touch()
        if account := self._account():
            shutil.chown(signal_file, account.uid, account.gid)
        self._primary.start()

    def take_over(self) -> None:
        """Become the primary, with all that the old one has by now; that is stopped."""
        self.kill()
        shutil.rmtree(self.data)
        self._prepare()
        self._primary.stop()
        self.start()
        self.promote()

    def _is_ready(self) -> bool:
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        return super()._is_ready() or (len(lines) > 7 and lines[7].strip() == "standby")

    def promote(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote(true, 30)").fetchone() == (True,)


class Cluster:
    """A primary with one done epoch, and a standby that has it too. The sink's dsn names both, and prefers neither."""

    def __init__(self, stack: list[LocalPostgres], **options: Any) -> None:
        self.primary = LocalPostgres()
        stack.append(self.primary)
        self.primary.start()
        with closing(Truth(self.primary.dsn)) as truth:
            truth.execute("CREATE TABLE orders (id bigint)")
        port = self.primary.port
        # the standby's port is known only once it runs
        self.standby = Standby(self.primary)
        stack.append(self.standby)
        first = Driver(Postgres(self.primary.dsn, table="orders", **options))
        with closing(first):
            assert first.committer.check(orders(1).schema) == []
            written, parts = first.prepare(0, orders(0))
            first.commit(written, parts)
        self.done = last_done(written, parts)
        self.standby.start()
        hosts = f"host=127.0.0.1,127.0.0.1 port={port},{self.standby.port}"
        dsn = f"{hosts} dbname=postgres user=postgres password={self.primary.password} sslmode=disable"
        self.driver = Driver(Postgres(dsn, table="orders", **options), first.identity)


@pytest.fixture
def started() -> Iterator[list[LocalPostgres]]:
    servers: list[LocalPostgres] = []
    yield servers
    for server in reversed(servers):
        server.close()


MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"atomic": False}, id="by-task"),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_standby_that_lags_is_asked_nothing_and_the_primary_is_found_again(
    mode: dict[str, Any], started: list[LocalPostgres]
) -> None:
    """Its markers lack the last epoch, which the primary has: to accept, or to repair, would write rows twice."""
    cluster = Cluster(started, **mode)
    with closing(cluster.driver) as driver:
        committer = driver.committer
        committer.verify_applied(cluster.done, None)
        written, parts = driver.prepare(1, orders(1))
        driver.commit(written, parts)
        last = last_done(written, parts)
        following = driver.write(2, orders(2))
        cluster.primary.kill()
        with pytest.raises(PrepareFailed, match="the server is a standby") as refused:
            committer.verify_applied(last, None)
        assert refused.value.may_pass
        assert "target_session_attrs=read-write" in refused.value.hint
        asks: list[Callable[[], object]] = [
            lambda: compare_alone(committer, last, None),
            lambda: committer.participant.operator().losses().lacking("table", last),
            lambda: driver.vote(following),
        ]
        if "atomic" in mode:
            asks.append(lambda: driver.write(3, orders(3)))
        for ask in asks:
            with pytest.raises(PrepareFailed, match=r"standby|recovery|read-only") as refused:
                ask()
            assert refused.value.may_pass, refused.value
            assert "target_session_attrs=read-write" in refused.value.hint
        cluster.primary.start()
        committer.verify_applied(last, None)
        committer.abort_orphans([])
        driver.run(2, orders(2))
        with closing(Truth(cluster.primary.dsn)) as truth:
            assert truth.rows("orders") == [(0,), (1,), (2,)]


def test_a_standby_that_was_promoted_is_compared_by_the_timeline_that_it_then_has(started: list[LocalPostgres]) -> None:
    """A session outlives the promotion: what it was told before counts no more."""
    cluster = Cluster(started)
    with closing(cluster.driver) as driver:
        cluster.primary.stop()
        with pytest.raises(PrepareFailed, match="the server is a standby"):
            driver.committer.verify_applied(cluster.done, None)
        cluster.standby.promote()
        driver.committer.verify_applied(cluster.done, None)
        written, (part,) = driver.prepare(1, orders(1))
        assert part["place"]["timeline"] == 2
        driver.commit(written, [part])
        driver.committer.verify_applied(last_done(written, [part]), None)


@pytest.mark.parametrize("mode", MODES)
def test_the_old_primary_is_refused_while_the_first_epoch_after_the_failover_is_pending(
    mode: dict[str, Any], started: list[LocalPostgres]
) -> None:
    """It has every done epoch, lacks what is prepared on the new one, and would get those rows instead of it."""
    cluster = Cluster(started, **mode)
    with closing(cluster.driver) as driver:
        committer = driver.committer
        cluster.primary.stop()
        cluster.standby.promote()
        committer.verify_applied(cluster.done, None)
        written, parts = driver.prepare(1, orders(1))
        pending = last_done(written, parts)
        committer.verify_applied(cluster.done, pending)
        cluster.standby.kill()
        cluster.primary.start()
        with pytest.raises(
            WentBack, match="epoch 1 was prepared on timeline 2: this server is the old primary"
        ) as told:
            committer.verify_applied(cluster.done, pending)
        assert "epochsink accept CHECKPOINT 0 --sink NAME" in told.value.hint
        with pytest.raises(WentBack, match="this server is the old primary"):
            compare_alone(committer, cluster.done, pending)
        committer.verify_applied(LastDone(0, "", ()), pending)  # as accepted by an operator
        cluster.primary.stop()
        cluster.standby.start()
        committer.verify_applied(cluster.done, pending)
        assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
        with closing(Truth(cluster.standby.dsn)) as truth:
            assert truth.rows("orders") == [(0,), (1,)]


def test_an_old_primary_that_has_a_done_epoch_still_prepared_does_not_commit_it(started: list[LocalPostgres]) -> None:
    """As after a failover that has lost the commit, which is made again; but here the present primary has it."""
    cluster = Cluster(started)
    with closing(cluster.driver) as driver:
        committer = driver.committer
        written, parts = driver.prepare(1, orders(1))
        cluster.standby.take_over()
        driver.commit(written, parts)
        done = last_done(written, parts)
        following, prepared = driver.prepare(2, orders(2))
        cluster.standby.kill()
        cluster.primary.start()
        with pytest.raises(WentBack, match="this server is the old primary"):
            committer.verify_applied(done, last_done(following, prepared))
        with closing(Truth(cluster.primary.dsn)) as truth:
            assert sorted(truth.prepared()) == gids(parts)
