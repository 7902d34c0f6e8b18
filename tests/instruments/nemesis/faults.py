"""What the nemesis can do to the cluster: every fault is made, and undone, by one object."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
from confluent_kafka import KafkaException

from epochsink.errors import ServiceError
from nemesis.services import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from nemesis.cluster import Cluster
    from nemesis.hosts import Host
    from nemesis.services import OnHost, Server

RECOVERY_SECONDS: Final = 60.0
STANDBY_SECONDS: Final = 10.0
CLOCK_STEPS: Final = (-1200, -10, 10, 1200)
NOTICED_SECONDS: Final = 60
"""Whoever sets a clock by more than this starts what runs there again."""
NETWORK, SERVER, FAILOVER, POSTGRES = range(4)
"""Which of two faults is undone first. A server that starts again has to be reached. A standby answers only once a
prepared transaction of many savepoints has ended, for which the query may need the other server. And PostgreSQL's lost
primary must not start again before it is the standby."""


@dataclass
class Fault:
    """One fault, not yet made. ``blinds`` names the services whose readers may be shown an old state meanwhile.

    Of two faults, the one with the smaller ``turn`` is undone first.
    """

    kind: str
    where: str
    make: Callable[[], None]
    undo: Callable[[], None]
    blinds: set[str] = field(default_factory=set)
    turn: int = NETWORK

    def __str__(self) -> str:
        return f"{self.kind} {self.where}"


class Faults:
    """Draws faults for a cluster. ``driver`` returns the host on which the driver runs."""

    def __init__(self, cluster: Cluster, chance: Random, driver: Callable[[], Host]) -> None:
        self._cluster = cluster
        self._chance = chance
        self._driver = driver

    def draw(self) -> Fault:
        """Return a fault of any kind that this cluster can suffer."""
        kinds = [self._isolate, self._one_way, self._link, self._link, self._slow, self._lossy, self._pause, self._kill]
        kinds += [self._disk, self._kill_worker, self._leader]
        if self._cluster.network.clocks:
            kinds.append(self._clock)
        if self._cluster.servers:
            kinds += [self._failover, self._kill]
        return self._chance.choice(kinds)()

    # ---- hosts

    def _any_host(self) -> Host:
        names = [name for name in self._cluster.network.hosts if name not in {"driver2", "master"}]
        return self._host(self._chance.choice(names))

    def _host(self, name: str) -> Host:
        return self._driver() if name == "driver" else self._cluster.network.hosts[name]

    def _service_host(self) -> Host:
        return self._chance.choice([one.host for one in self._cluster.services()])

    def _isolate(self) -> Fault:
        host = self._any_host()
        return self._net("isolated", host, lambda: host.cut(f"{host.network.subnet}.0/24"))

    def _one_way(self) -> Fault:
        host = self._any_host()
        to = self._chance.random() < 0.5
        what = "cannot send" if to else "cannot hear"
        return self._net(what, host, lambda: host.cut(f"{host.network.subnet}.0/24", to=to, come=not to))

    def _slow(self) -> Fault:
        host, rate = self._any_host(), self._chance.choice(("64kbit", "256kbit", "1mbit"))
        return self._net(f"slowed to {rate}", host, lambda: host.slow(rate))

    def _lossy(self) -> Fault:
        host, share = self._any_host(), self._chance.choice((0.05, 0.2, 0.4))
        return self._net(f"loses {share:.0%} of packets", host, lambda: host.lose(share))

    def _pause(self) -> Fault:
        host = self._any_host()
        return Fault("paused", host.name, host.pause, host.resume, _blinds(host.name))

    def _net(self, kind: str, host: Host, make: Callable[[], None]) -> Fault:
        return Fault(kind, host.name, make, host.connect, _blinds(host.name))

    def _link(self) -> Fault:
        """Cut a link that somebody needs, in one direction or both."""
        hosts = self._cluster.network.hosts
        of = {
            kind: [name for name in hosts if name.startswith(kind)]
            for kind in ("kafka", "postgres", "elastic", "worker")
        }
        pairs = [(one, other) for kind in of.values() for one in kind for other in kind if one != other]
        targets = [*of["kafka"], *of["postgres"], *of["elastic"], *(["store"] if self._cluster.store else [])]
        pairs += [(name, target) for name in ("driver", *of["worker"]) for target in targets]
        pairs += [("driver", worker) for worker in of["worker"]]
        one, other = map(self._host, self._chance.choice(pairs))
        how = self._chance.choice(({}, {}, {"to": False}, {"come": False}))
        arrow = {(): "-x-", ("to",): "<x-", ("come",): "-x>"}[tuple(how)]
        blinds = _blinds(one.name) & _blinds(other.name)
        return Fault("link cut", f"{one} {arrow} {other}", lambda: one.cut(other.address, **how), one.connect, blinds)

    def _leader(self) -> Fault:
        """Cut a leader off from those who follow it, and from nobody else: clients go on asking it."""
        try:
            host, service = self._chance.choice(self._cluster.leaders())
        except (KafkaException, RuntimeError):
            return self._link()
        peers = [other for other in self._cluster.network.hosts.values() if other.name.startswith(service)]

        def make() -> None:
            for peer in peers:
                if peer is not host:
                    host.cut(peer.address)

        return Fault("leader without followers", host.name, make, host.connect, _blinds(service))

    # ---- processes, disks, clocks

    def _kill(self) -> Fault:
        service = self._chance.choice(list(self._cluster.services()))
        return Fault("killed", service.host.name, service.host.kill, lambda: start_again(service), turn=_turn(service))

    def _kill_worker(self) -> Fault:
        name = self._chance.choice(("worker1", "worker2"))
        host = self._cluster.spark[name]
        return Fault("killed", name, host.kill, lambda: self._cluster.start_spark(name), turn=SERVER)

    def _clock(self) -> Fault:
        """Set a server's or a worker's wall clock: by seconds, or by more than a Kafka transaction may last."""
        service = self._chance.choice([*self._cluster.services(), None])
        name = service.host.name if service else self._chance.choice(("worker1", "worker2"))
        host, seconds = self._cluster.network.hosts[name], self._chance.choice(CLOCK_STEPS)

        def undo() -> None:
            host.set_clock(0)
            if abs(seconds) > NOTICED_SECONDS:
                # programs that wait by the wall clock wait as much longer when it goes back: Kafka's brokers among them
                host.kill()
                start_again(service) if service else self._cluster.start_spark(name)

        return Fault(f"clock {seconds:+d} s", name, lambda: host.set_clock(seconds), undo, turn=_turn(service))

    def _disk(self) -> Fault:
        service = self._chance.choice(list(self._cluster.services()))

        def undo() -> None:
            service.host.free_disk()
            # a server that has seen its disk full may have ended, or wait to be started again
            service.host.kill()
            start_again(service)

        host = service.host
        return Fault("disk full", host.name, host.fill_disk, undo, _blinds(host.name), turn=_turn(service))

    def _failover(self) -> Fault:
        """Lose PostgreSQL's primary for good, and promote the standby that has everything."""
        lost: list[tuple[Server, Server]] = []

        def make() -> None:
            primary, standby, _ = self._cluster.roles()
            # what a primary shows after a crash of its own, the standby may not have yet
            until(lambda: has_everything(primary), STANDBY_SECONDS, "the synchronous standby")
            lost.append((primary, standby))
            primary.host.kill()
            standby.become_primary(RECOVERY_SECONDS)

        def undo() -> None:
            for primary, standby in lost:
                # the other fault may be theirs, and is undone later
                primary.host.free_disk()
                standby.host.free_disk()
                start_again(standby)
                standby.become_primary(RECOVERY_SECONDS)
                primary.follow(standby)

        return Fault("failover", "postgres", make, undo, turn=FAILOVER)


def has_everything(primary: Server) -> bool:
    """Return whether the synchronous standby has all that the primary has written."""
    try:
        return bool(
            primary.query(
                "SELECT count(*) FROM pg_stat_replication "
                "WHERE sync_state = 'sync' AND flush_lsn >= pg_current_wal_lsn()"
            )
        )
    except psycopg.Error:
        return False


def start_again(service: OnHost) -> None:
    """Start a server whose processes have been killed, unless that has been done for another fault."""
    if service.host.pids():
        return
    # the other fault may have filled it, and is undone later
    service.host.free_disk()
    until(lambda: not service.running, RECOVERY_SECONDS, "the death of a service")
    deadline = time.monotonic() + RECOVERY_SECONDS
    while True:
        try:
            service.start()
        except ServiceError:
            # a broker that cannot hear the others may end while it starts; whoever supervises it starts it again
            if time.monotonic() > deadline:
                raise
        else:
            return


def _turn(service: OnHost | None) -> int:
    return POSTGRES if service and service.host.name.startswith("postgres") else SERVER


def _blinds(host: str) -> set[str]:
    """Return the service whose readers may see an old state while this host is not itself.

    Not PostgreSQL: its readers want the primary, and a standby has everything before it is promoted.
    """
    return {kind for kind in ("kafka", "elastic") if host.startswith(kind)}
