"""The faults of the soak strike whom they should, are undone in the right order, and a run that ends early is told."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import nemesis.run
from epochsink.errors import ServiceError
from epochsink.protocol.storage import LocalStorage
from nemesis import cluster as clusters
from nemesis.cluster import Cluster
from nemesis.faults import Fault, Faults, start_again
from nemesis.run import Leg, Nemesis
from nemesis.supervisor import Driver, Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    from nemesis.hosts import Host
    from nemesis.services import OnHost

NAMES = ("kafka1", "kafka2", "postgres1", "postgres2", "postgres3", "elastic1", "elastic2", "master", "worker1")


class StubHost:
    """A host of which only is known what was done to it. ``pid`` is 0 once its processes are killed."""

    folder: Path

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = self.address = name
        self.network = SimpleNamespace(subnet="10.0.0")
        self.told = told
        self.pid = 1
        self.full = False

    def __repr__(self) -> str:
        return self.name

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def kill(self) -> None:
        self.told.append(f"kill {self.name}")
        self.pid = 0

    def command(self, command: list[str]) -> list[str]:
        return command

    def fill_disk(self) -> None:
        self.full = True

    def free_disk(self) -> None:
        self.told.append(f"free {self.name}")
        self.full = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.told.append(f"{name} {self.name}")


class StubServer:
    """A server of PostgreSQL: a standby is promoted only if it runs."""

    running = False

    def __init__(self, host: StubHost) -> None:
        self.host = host
        self.follows = ""

    def start(self) -> None:
        if self.host.full:
            raise AssertionError(f"{self.host} starts with a full disk")
        self.host.told.append(f"start {self.host}{self.follows}")
        self.host.pid = 1

    def query(self, _statement: str) -> bool:
        return True

    def become_primary(self, _seconds: float) -> None:
        if not self.host.pid:
            raise TimeoutError("the promotion did not come")

    def follow(self, primary: StubServer) -> None:
        self.follows = f" behind {primary.host}"
        self.start()


class StubCluster:
    """A cluster of stub hosts."""

    def __init__(self, told: list[str]) -> None:
        hosts = {name: StubHost(name, told) for name in (*NAMES, "worker2", "driver", "driver2")}
        self.network = SimpleNamespace(hosts=hosts, clocks=True)
        self.spark = {name: host for name, host in hosts.items() if name.startswith(("driver", "worker"))}
        self.servers = [StubServer(hosts[name]) for name in NAMES if name.startswith("postgres")]
        self.others: list[StubServer] = []
        self.store = None

    def services(self) -> list[StubServer]:
        return [*self.servers, *self.others]

    def roles(self) -> list[StubServer]:
        return self.servers

    def leaders(self) -> list[tuple[StubHost, str]]:
        return [(self.network.hosts[f"{service}1"], service) for service in ("kafka", "postgres", "elastic")]

    def start_spark(self, name: str) -> None:
        self.spark[name].told.append(f"start {name}")


@pytest.fixture
def told() -> list[str]:
    """Return what is done to hosts, in order."""
    return []


@pytest.fixture
def stubs(told: list[str]) -> StubCluster:
    return StubCluster(told)


def faults(stubs: StubCluster, driver: str = "driver", seed: int = 1) -> Faults:
    """Return the source of faults of a cluster whose driver is on a host."""
    host = cast("Host", stubs.network.hosts[driver])
    return Faults(cast("Cluster", stubs), random.Random(seed), lambda: host)


def drawn(stubs: StubCluster, kind: str, where: str) -> Fault:
    """Return a fault of a kind at a host."""
    source = faults(stubs)
    return next(fault for fault in (source.draw() for _ in range(20_000)) if (fault.kind, fault.where) == (kind, where))


def test_a_server_that_ends_while_it_starts_is_started_again(stubs: StubCluster, told: list[str]) -> None:
    """Its supervisor would: a broker that cannot hear the others for a while gives up."""
    fails = [ServiceError("kafka ended with status 1 while starting")]

    class Fragile(StubServer):
        def start(self) -> None:
            if fails:
                raise fails.pop()
            super().start()

    host = stubs.network.hosts["postgres1"]
    host.pid = 0
    start_again(cast("OnHost", Fragile(host)))
    assert told == ["free postgres1", "start postgres1"]


def test_no_fault_excuses_what_readers_of_postgresql_see(stubs: StubCluster) -> None:
    every = [faults(stubs, seed=seed).draw() for seed in range(500)]
    assert {fault.kind for fault in every} >= {"failover", "paused", "killed", "disk full", "leader without followers"}
    assert set().union(*(fault.blinds for fault in every)) == {"kafka", "elastic"}


def test_what_strikes_the_driver_strikes_the_host_on_which_it_runs(stubs: StubCluster, told: list[str]) -> None:
    every = [faults(stubs, "driver2", seed).draw() for seed in range(300)]
    assert any(fault.where.split()[0] == "driver2" for fault in every)
    for fault in every:
        if fault.kind != "failover":
            fault.make()
    assert any(done.endswith(" driver2") for done in told)
    assert not any(done.endswith(" driver") for done in told)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("kind", "where"),
    [("killed", "postgres2"), ("disk full", "postgres2"), ("disk full", "postgres1"), ("clock +1200 s", "postgres1")],
)
def test_a_lost_primary_starts_again_as_a_standby_whatever_else_has_struck(
    stubs: StubCluster, told: list[str], kind: str, where: str, order: int
) -> None:
    """The other fault may have killed the standby that is promoted, or start the lost primary as it is undone."""
    both = [drawn(stubs, "failover", "postgres"), drawn(stubs, kind, where)]
    for fault in both:
        fault.make()
    if kind == "killed":
        assert not stubs.servers[1].host.pid
    for fault in sorted(both[::order], key=lambda one: one.turn):
        fault.undo()
    assert "start postgres1" not in told
    assert "start postgres1 behind postgres2" in told
    assert "free postgres1" in told
    assert stubs.servers[0].host.pid
    assert stubs.servers[1].host.pid


def test_after_any_two_faults_every_server_runs(stubs: StubCluster) -> None:
    stubs.others = [StubServer(stubs.network.hosts[name]) for name in NAMES if name.startswith(("kafka", "elastic"))]
    source = faults(stubs)
    for _ in range(5_000):
        both = [source.draw(), source.draw()]
        for fault in both:
            # the nemesis goes on with the other one, too
            with suppress(TimeoutError):
                fault.make()
        for fault in sorted(both, key=lambda one: one.turn):
            fault.undo()
        assert [one.host for one in stubs.services() if not one.host.pid or one.host.full] == [], both


def test_another_server_is_there_again_before_a_standby_is_waited_for(stubs: StubCluster) -> None:
    """The standby answers once the query has ended what it has prepared, and the query may need that server."""
    stubs.others = [StubServer(stubs.network.hosts["kafka1"])]
    kinds = [("killed", "postgres2"), ("failover", "postgres"), ("disk full", "kafka1")]
    every = [drawn(stubs, kind, where) for kind, where in kinds]
    assert sorted(every, key=lambda one: one.turn) == every[::-1]


def test_a_worker_that_has_just_been_killed_is_started_again(
    monkeypatch: pytest.MonkeyPatch, told: list[str], tmp_path: Path
) -> None:
    """Its process is dead, and whoever started it has not noticed yet."""
    host, dies = StubHost("worker1", told), time.monotonic() + 0.3
    host.folder = tmp_path

    class Old:
        @property
        def running(self) -> bool:
            return time.monotonic() < dies

        def release(self) -> None:
            assert not self.running
            told.append("released")

    monkeypatch.setattr(clusters, "SupervisedProcess", lambda _launch: told.append("started"))
    monkeypatch.setattr(clusters, "answers", lambda *_: True)
    cluster = cast("Cluster", SimpleNamespace(spark={"worker1": host}, _processes={"worker1": Old()}, master=""))
    Cluster.start_spark(cluster, "worker1")
    assert told == []
    host.kill()
    Cluster.start_spark(cluster, "worker1")
    assert told == ["kill worker1", "released", "started"]


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_left_in_the_spool_is_found_wherever_the_checkpoint_lies(tmp_path: Path, *, stored: bool) -> None:
    (tmp_path / "checkpoint" / "epochsink" / "spool" / "query" / "3-attempt").mkdir(parents=True)
    store = SimpleNamespace(files=lambda folder: LocalStorage(tmp_path / folder))
    folder = tmp_path / "elsewhere" if stored else tmp_path
    cluster = cast("Cluster", SimpleNamespace(store=store if stored else None, folder=folder))
    assert Cluster.spooled(cluster) == ["query/3-attempt"]


def test_what_is_retained_is_not_left_over(tmp_path: Path) -> None:
    attempt = "0" * 32
    for name in (f"3-{attempt}", f"4-{attempt}", f"retained/100-200-3-{attempt}-50"):
        (tmp_path / "checkpoint/epochsink/spool/query" / name).mkdir(parents=True)
    cluster = cast("Cluster", SimpleNamespace(store=None, folder=tmp_path))
    assert Cluster.spooled(cluster) == [f"query/4-{attempt}"]


# ---- drivers


@pytest.fixture
def supervisor(stubs: StubCluster, tmp_path: Path) -> Supervisor:
    """Return a supervisor whose drivers are started by hand."""
    stubs.folder = tmp_path  # type: ignore[attr-defined]
    made = Supervisor(
        cast("Cluster", stubs), cast("Any", None), cast("Any", None), random.Random(1), lambda *_, **__: None
    )
    made.driver = driver_on(made.host)
    return made


def driver_on(host: Host) -> Driver:
    """Return a driver that runs on a host."""
    return Driver(1, "", cast("Any", None), host, cast("Any", None), "", cast("Any", None))


def test_a_driver_that_takes_over_never_shares_the_host_of_the_one_that_is_taken_for_dead(
    supervisor: Supervisor,
) -> None:
    """Else a kill of the one would be a kill of both."""
    hosts = []
    for _ in range(3):
        hosts.append(supervisor.host.name)
        supervisor.usurp()
        assert supervisor.host.name != hosts[-1]
        supervisor.driver = driver_on(supervisor.host)
        supervisor.zombies.clear()
    assert hosts == ["driver", "driver2", "driver"]


def test_a_fault_of_drivers_that_strikes_nobody_is_not_made(supervisor: Supervisor) -> None:
    supervisor.usurp()
    with pytest.raises(RuntimeError):
        supervisor.kill()
    supervisor.driver = driver_on(supervisor.host)
    with pytest.raises(RuntimeError):
        supervisor.usurp()


# ---- what a run tells


class StubRig:
    """A rig in which an epoch comes after some seconds, and canaries die before. ``timeline`` and all else is mute."""

    def __init__(self, took: float, deaths: list[float], idle: list[str]) -> None:
        began = time.monotonic()
        self.cluster = SimpleNamespace(idle=lambda: idle)
        self.supervisor = SimpleNamespace(deaths_of_canaries=[began + died for died in deaths], host=None)
        self.timeline = SimpleNamespace(tell=lambda *_, **__: None)
        self.watch = SimpleNamespace(epochs=0)
        self._took = took

    def progress(self) -> float:
        return self._took


@pytest.mark.parametrize(
    ("took", "deaths", "counts"),
    [(102, [90], 90), (38, [10], 28), (38, [18, 37], 19), (20, [-5], 20), (20, [25], 20), (50, [25], 25), (9, [], 9)],
)
def test_a_canary_divides_the_wait_for_an_epoch_and_hides_none_of_it(
    took: float, deaths: list[float], counts: float
) -> None:
    leg = Leg(0, cast("Path", None))
    rig = cast("Any", StubRig(took, deaths, []))
    Nemesis(rig, random.Random(1), leg, print)._wait_for_progress()
    [recovery] = leg.recoveries
    assert recovery.seconds == pytest.approx(counts, abs=0.5)
    assert bool(leg.late) == (counts > 30)
    assert leg.anomalies == []


def test_a_server_that_is_not_started_again_is_an_anomaly_of_the_run() -> None:
    leg = Leg(0, cast("Path", None))
    Nemesis(cast("Any", StubRig(1, [], ["worker1"])), random.Random(1), leg, print)._wait_for_progress()
    assert leg.anomalies == ["the run has left hosts idle: worker1"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_record_of_a_run_that_is_ended_early_tells_what_was_found_until_then(
    ends: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def play(leg: Leg, *_: object) -> None:
        leg.anomalies.append(f"lost: of seed {leg.seed}")
        if leg.seed == 8:
            raise ends

    monkeypatch.setattr(nemesis.run, "play", play)
    monkeypatch.setattr(nemesis.run, "missing", lambda: "")
    records, signals = tmp_path / "records", []
    monkeypatch.setattr("nemesis.run.signal.signal", lambda *_: signals.append(1))
    options = ["--hours", "2.5", "--seed", "7", "--folder", str(tmp_path), "--keep", str(records)]
    monkeypatch.setattr("sys.argv", ["run", *options])
    with pytest.raises(ends):
        nemesis.run.main()
    [record] = records.iterdir()
    assert json.loads(record.read_text())["figures"]["anomalies"] == ["lost: of seed 7", "lost: of seed 8"]
    assert signals


def test_a_run_that_is_ended_by_hand_has_judged_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ended:
        def __init__(self, *_: object, **__: object) -> None:
            raise SystemExit(1)

    monkeypatch.setattr(nemesis.run, "Rig", Ended)
    leg = Leg(3, tmp_path / "leg")
    with pytest.raises(SystemExit):
        nemesis.run.play(leg, SimpleNamespace(sinks="kafka", store="", subnet=""), 1.0, print)  # type: ignore[arg-type]
    assert leg.anomalies == ["the run has broken off: SystemExit(1)"]
