"""The services of the cluster: what epochsink's own devkit runs on the loopback, each on a host instead."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import psycopg

from epochsink_devkit.services.elasticsearch import LocalElasticsearch
from epochsink_devkit.services.kafka import LocalKafka
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.postgres import DEFAULTS, LocalPostgres, _program

if TYPE_CHECKING:
    from epochsink_devkit.services.process import Launch
    from nemesis.hosts import Host

KAFKA_PORT: Final = 9092
POSTGRES_PORT: Final = 5432
ELASTICSEARCH_PORT: Final = 9200
_ANSWER_SECONDS: Final = 1.0


def answers(address: str, port: int) -> bool:
    """Return whether somebody listens there."""
    try:
        socket.create_connection((address, port), _ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


class OnHost(LocalService):
    """What makes a local service one of a host."""

    host: Host

    def _launch(self) -> Launch:
        launch = super()._launch()
        command = self.host.command(launch.command, launch.uid, launch.gid)
        return replace(launch, command=command, uid=None, gid=None)

    def _choose_port(self) -> None:
        """Keep the port that was given: nobody else is on the host."""


class Broker(OnHost, LocalKafka):
    """One of a cluster's brokers, which is a controller too."""

    def __init__(self, host: Host, number: int, brokers: list[Host]) -> None:
        voters = ",".join(f"{at}@{one.address}:9093" for at, one in enumerate(brokers, start=1))
        settings: dict[str, str | int | bool] = {
            "node.id": number,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{host.address}:{KAFKA_PORT},CONTROLLER://{host.address}:9093",
            "advertised.listeners": f"PLAINTEXT://{host.address}:{KAFKA_PORT}",
            "default.replication.factor": 3,
            "min.insync.replicas": 2,
            "offsets.topic.replication.factor": 3,
            "transaction.state.log.replication.factor": 3,
            "transaction.state.log.min.isr": 2,
            "share.coordinator.state.topic.replication.factor": 3,
            "share.coordinator.state.topic.min.isr": 2,
            "unclean.leader.election.enable": False,
            # a follower that is gone leaves the ISR soon, and writing goes on
            "replica.lag.time.max.ms": 4000,
            "transaction.max.timeout.ms": 900_000,
            "log.segment.bytes": 16 * 2**20,
        }
        super().__init__(settings, short_lived=True, home=host.folder / "kafka", port=KAFKA_PORT)
        self.host = host

    def _jvm(self) -> list[str]:
        return [*super()._jvm(), "-XX:+UseSerialGC"]

    def _command(self) -> list[str]:
        return ["-Xmx256m" if word.startswith("-Xmx") else word for word in super()._command()]

    def _is_ready(self) -> bool:
        return "Kafka Server started" in self._log_of_this_start() and answers(self.host.address, KAFKA_PORT)


class Node(OnHost, LocalElasticsearch):
    """One of a cluster's Elasticsearch nodes."""

    def __init__(self, host: Host, nodes: list[Host]) -> None:
        settings: dict[str, str | int | bool] = {
            "node.name": host.name,
            "discovery.type": "multi-node",
            "discovery.seed_hosts": ",".join(f"{one.address}:9300" for one in nodes),
            "cluster.initial_master_nodes": nodes[0].name,
            "network.host": host.address,
            "transport.port": 9300,
            # a node that is gone is missed within seconds
            "cluster.fault_detection.follower_check.interval": "500ms",
            "cluster.fault_detection.follower_check.timeout": "2s",
            "cluster.fault_detection.leader_check.interval": "500ms",
            "cluster.fault_detection.leader_check.timeout": "2s",
            "cluster.publish.timeout": "5s",
        }
        super().__init__(settings, short_lived=True, home=host.folder / "elasticsearch", port=ELASTICSEARCH_PORT)
        self.host = host

    @property
    def url(self) -> str:
        """Its HTTP address."""
        return f"http://{self.host.address}:{ELASTICSEARCH_PORT}"

    def _command(self) -> list[str]:
        heap = {"-Xms": "-Xms384m", "-Xmx": "-Xmx384m"}
        return [heap.get(word[:4], word) for word in super()._command()]

    def _after_spawn(self, deadline: float) -> None:
        port, token = self._gateway(deadline)
        order = {"port": port, "token": token, "home": str(self.home), "settings": self.node_settings()}
        boot = [sys.executable, "-W", "ignore", "-m", "epochsink_devkit.services.elasticsearch_boot"]
        # not waited for: a node starts without a master, which may be cut off
        booting = subprocess.Popen(
            self.host.command(boot),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert booting.stdin
        booting.stdin.write(json.dumps(order).encode())
        booting.stdin.close()

    def _is_ready(self) -> bool:
        return answers(self.host.address, ELASTICSEARCH_PORT)


class Server(OnHost, LocalPostgres):
    """One PostgreSQL, primary or standby. ``confirms`` names the standby that has to have what is committed here."""

    def __init__(self, host: Host, confirms: str, peers: list[Host]) -> None:
        super().__init__(
            {"wal_keep_size": "256MB", "hot_standby": True}, home=host.folder / "postgres", port=POSTGRES_PORT
        )
        self.host = host
        self._confirms = confirms
        self._peers = peers

    def _command(self) -> list[str]:
        settings: dict[str, Any] = {
            **DEFAULTS,
            **self.settings,
            "listen_addresses": self.host.address,
            "port": POSTGRES_PORT,
            "synchronous_standby_names": self._confirms,
            "shared_buffers": "32MB",
            "wal_receiver_timeout": "5s",
            "wal_sender_timeout": "5s",
            "wal_receiver_status_interval": "1s",
            # so that a standby asks again soon
            "wal_retrieve_retry_interval": "500ms",
        }
        options = [f"--{name}={self._with_port(value)}" for name, value in settings.items()]
        return [str(_program("postgres", self._account())), "-D", str(self.data), *options]

    def _prepare(self) -> None:
        super()._prepare()
        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 0.0.0.0/0 scram-sha-256\nhost replication all 0.0.0.0/0 scram-sha-256\n")

    def _is_ready(self) -> bool:
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        state = lines[7].strip() if len(lines) > 7 else ""
        return state in {"ready", "standby"} and answers(self.host.address, POSTGRES_PORT)

    @cached_property
    def password(self) -> str:
        """All servers have one. Read once: the file is gone for a while as this server becomes a copy of another."""
        return super().password

    @property
    def dsn(self) -> str:
        """For psycopg, and for this server alone."""
        return f"postgresql://postgres:{self.password}@{self.host.address}:{POSTGRES_PORT}/postgres?sslmode=disable"

    def query(self, statement: str) -> Any:
        """Return the first value that a statement yields here."""
        with psycopg.connect(self.dsn, autocommit=True, connect_timeout=3) as connection:
            row = connection.execute(statement).fetchone()
        return row[0] if row else None

    def is_primary(self) -> bool:
        """Return whether it answers, and takes writes."""
        try:
            return not self.query("SELECT pg_is_in_recovery()")
        except psycopg.Error:
            return False

    def promote(self) -> None:
        """Make a standby the primary; returns when it is."""
        self.query("SELECT pg_promote(true, 30)")

    def become_primary(self, seconds: float) -> None:
        """Promote this standby, if it is one still, and wait until it takes writes."""
        with suppress(psycopg.Error):
            if not self.is_primary():
                self.promote()
        until(self.is_primary, seconds, "the promotion")

    def follow(self, primary: Server) -> None:
        """Become a standby of a server that runs: a copy of its data while it writes, as pg_basebackup makes it."""
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
        self.home_of_copy(primary)
        with psycopg.connect(primary.dsn, autocommit=True, connect_timeout=5) as connection:
            connection.execute("SELECT pg_backup_start('copy', true)")
            subprocess.run(["cp", "-a", f"{primary.data}/.", str(self.data)], check=False, capture_output=True)
            label = connection.execute("SELECT labelfile FROM pg_backup_stop(false)").fetchone()
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        self._write("backup_label", label[0] if label else "")
        self.stand_by()
        self.start()

    def home_of_copy(self, primary: Server) -> None:
        """Make the folders, as a preparation would, with the other server's password."""
        account = self._account()
        self._home = self.host.folder / "postgres"
        self._home.mkdir(parents=True, exist_ok=True)
        self._home.chmod(0o711)
        self.data.mkdir(mode=0o700)
        (self._home / ".prepared").touch()
        shutil.copy2(primary.home / "password", self._home / "password")
        if account:
            for path in (self.data, self._home / "password"):
                os.chown(path, account.uid, account.gid)

    def stand_by(self) -> None:
        """Say in its data that it follows whichever of its peers is the primary."""
        hosts = ",".join(peer.address for peer in self._peers if peer is not self.host)
        where = (
            f"host={hosts} port={POSTGRES_PORT} user=postgres password={self.password} sslmode=disable "
            f"application_name={self.host.name} target_session_attrs=primary connect_timeout=2 "
            "keepalives_idle=2 keepalives_interval=1 keepalives_count=2 tcp_user_timeout=4000"
        )
        self._write("postgresql.auto.conf", f"primary_conninfo = '{where}'\n")
        self._write("standby.signal", "")

    def _write(self, name: str, text: str) -> None:
        path = self.data / name
        path.write_text(text)
        path.chmod(0o600)
        if account := self._account():
            os.chown(path, account.uid, account.gid)


def until(condition: Any, seconds: float, what: str) -> None:
    """Wait until something holds. TimeoutError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.2)
