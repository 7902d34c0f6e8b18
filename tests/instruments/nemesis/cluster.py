"""The cluster of hosts: Kafka, PostgreSQL, Elasticsearch and Spark, as far as the chosen sinks need them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pyspark
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import Elasticsearch
from part_targets import PartTargets
from tables import make_table

from epochsink.protocol.retained import Term
from epochsink.protocol.storage import LocalStorage
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, spark_packages
from epochsink_devkit.services.process import Launch, SupervisedProcess
from nemesis.hosts import Host, Network
from nemesis.services import ELASTICSEARCH_PORT, KAFKA_PORT, POSTGRES_PORT, Broker, Node, OnHost, Server, answers, until
from nemesis.store import STORES, Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from epochsink.protocol.storage import Storage
    from epochsink_devkit.history.readers import TargetReader

SINKS: Final = ("kafka", "postgres", "elasticsearch")
SOURCE: Final = "source"
SPOOL: Final = "epochsink/spool"
RETAINED: Final = "retained"
OUT: Final = "out"
TRANSACTIONS: Final = "__transaction_state"
PARTITIONS: Final = 2
FIRST_TRANSACTION_SECONDS: Final = 300
SKEW_SECONDS: Final = 600
"""Kafka refuses records from an hour ahead, so two hosts differ by less."""
_HOME: Final = Path(pyspark.__file__).parent
_DEPLOY: Final = "org.apache.spark.deploy"
_INDEX: Final = {"number_of_shards": 2, "number_of_replicas": 1, "index.unassigned.node_left.delayed_timeout": "0"}


class Cluster:
    """All hosts and what runs on them. As a context manager it ends everything that it has started.

    ``store`` says where the checkpoint lies: on `hdfs` or `s3`, which have a host then, or on the machine's own files.
    With ``part`` there are also sinks that set rows aside, and one that adds them up. With ``skew`` the wall clock of
    each host is wrong, from the start, by something that is drawn from it. ``atomic`` is that of PostgreSQL's sink.
    """

    def __init__(
        self,
        folder: Path,
        sinks: Sequence[str],
        *,
        subnet: str,
        store: str = "",
        skew: Random | None = None,
        atomic: bool = True,
        part: bool = False,
    ) -> None:
        self.folder = folder
        self.sinks = sinks
        self.network = Network(folder / "hosts", subnet)
        self.brokers: list[Broker] = []
        self.servers: list[Server] = []
        self.nodes: list[Node] = []
        self.store: Store | None = None
        self._kind_of_store = store
        self.spark: dict[str, Host] = {}
        self._processes: dict[str, SupervisedProcess] = {}
        self._skew = skew
        self._atomic = atomic
        self._part = part
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.enter_context(self.network)
            starting.callback(self._close_services)
            self._start_services()
            self._start_spark()
            self._make_targets()
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _close_services(self) -> None:
        for host in self.network.hosts.values():
            host.heal()
            host.kill()
        for process in self._processes.values():
            process.release()

    def _host(self, name: str, disk: str = "") -> Host:
        host = self.network.host(name, disk=disk)
        if self._skew:
            host.skew = round(self._skew.uniform(-SKEW_SECONDS, SKEW_SECONDS))
            host.set_clock(0)
        return host

    # ---- services

    def services(self) -> Iterator[OnHost]:
        """Yield every server of Kafka, PostgreSQL and Elasticsearch."""
        yield from (*self.brokers, *self.servers, *self.nodes)

    def idle(self) -> list[str]:
        """Return the hosts of servers and of Spark's master and workers on which nothing runs."""
        hosts = [one.host for one in self.services()] + [self.spark[name] for name in ("master", "worker1", "worker2")]
        return [host.name for host in hosts if not host.pids()]

    def _start_services(self) -> None:
        hosts = [self._host(f"kafka{number}", disk="300m") for number in (1, 2, 3)]
        self.brokers = [Broker(host, number, hosts) for number, host in enumerate(hosts, start=1)]
        if "postgres" in self.sinks:
            hosts = [self._host(f"postgres{number}", disk="900m") for number in (1, 2, 3)]
            # the third follows without being waited for
            self.servers = [
                Server(host, confirms, hosts)
                for host, confirms in zip(hosts, ("postgres2", "postgres1", ""), strict=True)
            ]
        if "elasticsearch" in self.sinks:
            hosts = [self._host(f"elastic{number}", disk="300m") for number in (1, 2)]
            self.nodes = [Node(host, hosts) for host in hosts]
        if self._kind_of_store:
            self.store = STORES[self._kind_of_store](self._host("store"))
            self.store.start()
        for kind in (LocalKafka, LocalElasticsearch):
            # which a server on a host cannot make
            kind()._archives()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: one.start(), [*self.brokers, *self.servers[:1], *self.nodes]))
        for standby in self.servers[1:]:
            standby.home_of_copy(self.servers[0])
            standby.follow(self.servers[0])

    def _make_targets(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        topics = [NewTopic(SOURCE, PARTITIONS, 3), NewTopic(OUT, PARTITIONS, 3)]
        for made in admin.create_topics(topics).values():
            made.result(timeout=60)
        if "kafka" in self.sinks:
            # the first of all makes the brokers' log of transactions, which may take minutes on a busy machine
            first = Producer({"bootstrap.servers": self.bootstrap_servers, "transactional.id": "first", "log_level": 0})
            first.init_transactions(FIRST_TRANSACTION_SECONDS)
        if self.servers:
            make_table(self.dsn, OUT)
        if self.nodes:
            client = Elasticsearch(self.urls, request_timeout=60)
            until(lambda: client.cluster.health()["number_of_nodes"] == len(self.nodes), 60, "the second node")
            client.close()
        self.part.make()

    @property
    def part(self) -> PartTargets:
        """The targets that cannot take all rows, and the one that adds them up; none without ``part``."""
        kinds = self.sinks if self._part else ()
        return PartTargets(
            self.bootstrap_servers if "kafka" in kinds else "",
            self.dsn if "postgres" in kinds else "",
            self.urls if "elasticsearch" in kinds else [],
            copies=2,
        )

    @property
    def checkpoint(self) -> str:
        """Where the pipeline keeps its checkpoint."""
        return f"{self.store.url}/checkpoint" if self.store else str(self.folder / "checkpoint")

    def watched(self) -> Path | Storage:
        """Return the checkpoint as the checker's watch takes it."""
        if self.store is None:
            return self.folder / "checkpoint"
        return self.store.files("checkpoint")

    def spooled(self) -> list[str]:
        """Return what the spool holds besides retained epochs, each attempt as its query's id and its name."""
        files = self.store.files("checkpoint") if self.store else LocalStorage(self.folder / "checkpoint")
        held: list[str] = []
        for query in files.names(SPOOL):
            terms = map(Term.parse, files.names(f"{SPOOL}/{query}/{RETAINED}"))
            kept = {RETAINED, *(f"{term.epoch.number}-{term.epoch.attempt}" for term in terms if term)}
            held += [f"{query}/{attempt}" for attempt in files.names(f"{SPOOL}/{query}") if attempt not in kept]
        return held

    # ---- who leads

    @property
    def can_be_set_back(self) -> bool:
        """Whether there is a standby that nobody waits for, and an operator's command can reach the checkpoint."""
        return bool(self.servers) and self.store is None

    def roles(self) -> tuple[Server, Server, Server]:
        """Return PostgreSQL's primary, its synchronous standby, the other one. RuntimeError if none takes writes."""
        first, second, third = self.servers
        if first.is_primary():
            return first, second, third
        if second.is_primary():
            return second, first, third
        raise RuntimeError("no primary answers")

    def leaders(self) -> list[tuple[Host, str]]:
        """Return who leads in each service, and how its hosts' names begin. RuntimeError, KafkaException if unknown."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        topics = admin.list_topics(timeout=5).topics
        topic = topics[TRANSACTIONS if TRANSACTIONS in topics else SOURCE]
        numbers = {partition.leader for partition in topic.partitions.values()} - {-1}
        found = [(self.brokers[number - 1].host, "kafka") for number in sorted(numbers)][:1]
        if self.servers:
            found.append((self.roles()[0].host, "postgres"))
        if self.nodes:
            found.append((self.nodes[0].host, "elastic"))
        if not found:
            raise RuntimeError("no leader is known")
        return found

    # ---- addresses

    @property
    def bootstrap_servers(self) -> str:
        """All brokers."""
        return ",".join(f"{one.host.address}:{KAFKA_PORT}" for one in self.brokers)

    @property
    def dsn(self) -> str:
        """Whichever of the servers takes writes."""
        where = ",".join(f"{one.host.address}:{POSTGRES_PORT}" for one in self.servers)
        password = self.servers[0].password
        return f"postgresql://postgres:{password}@{where}/postgres?sslmode=disable&target_session_attrs=read-write"

    @property
    def urls(self) -> list[str]:
        """All nodes."""
        return [f"http://{one.host.address}:{ELASTICSEARCH_PORT}" for one in self.nodes]

    def sink_options(self) -> dict[str, dict[str, Any]]:
        """Return the sinks, as the pipeline takes them."""
        options: dict[str, dict[str, Any]] = {}
        if "kafka" in self.sinks:
            servers = self.bootstrap_servers
            options["topic"] = {
                "kind": "Kafka",
                "bootstrap_servers": servers,
                "topic": OUT,
                "key": "cast(key AS string)",
            }
        if "postgres" in self.sinks:
            options["table"] = {"kind": "Postgres", "dsn": self.dsn, "table": OUT, "atomic": self._atomic}
        if "elasticsearch" in self.sinks:
            keys = {"key": "key", "order_by": "kver", "delete_when": "op = 'D'"}
            options["log"] = {"kind": "Elasticsearch", "hosts": self.urls, "index": "log", "create": _INDEX}
            options["state"] = {**options["log"], "index": "state", **keys}
        return options | self.part.sinks()

    def readers(self) -> Iterator[tuple[CheckedTarget, TargetReader]]:
        """Yield each target with its reader."""
        if "kafka" in self.sinks:
            yield CheckedTarget("topic", atomic=False), KafkaReader(self.bootstrap_servers, OUT, seconds=15)
        if "postgres" in self.sinks:
            reader = PostgresReader(f"{self.dsn}&connect_timeout=3&tcp_user_timeout=4000", OUT)
            yield CheckedTarget("table", atomic=self._atomic), reader
        if "elasticsearch" in self.sinks:
            for name, keyed in (("log", False), ("state", True)):
                # the client may ask either node
                indices = ElasticsearchReader(self.urls, name, max_retries=3)  # type: ignore[arg-type]
                yield CheckedTarget(name, atomic=False, keyed=keyed), indices

    # ---- Spark

    @property
    def master(self) -> str:
        """Spark's master."""
        return f"spark://{self.spark['master'].address}:7077"

    def _start_spark(self) -> None:
        for name in ("master", "worker1", "worker2", "driver", "driver2"):
            self.spark[name] = self._host(name)
        for name in ("master", "worker1", "worker2"):
            self.start_spark(name)

    def start_spark(self, name: str) -> None:
        """Start the master or a worker, if it does not run."""
        host, old = self.spark[name], self._processes.get(name)
        if old is not None:
            if old.running and host.pids():
                return
            # one that has just been killed is not known to be dead yet
            until(lambda: not old.running, 60, f"the death of Spark's {name}")
            old.release()
        if name == "master":
            command = ["master.Master", "--host", host.address, "--port", "7077"]
        else:
            # two cores, so that a driver that takes over finds room beside the one that it takes over from
            size = ("--cores", "2", "--memory", "1200m", "--work-dir", str(host.folder / "work"))
            command = ["worker.Worker", "--host", host.address, "--port", "7078", *size, self.master]
        environment = {
            "SPARK_HOME": str(_HOME),
            "SPARK_LOCAL_IP": host.address,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dspark.worker.timeout=15",
        }
        launch = Launch(
            command=host.command(
                [str(_HOME / "bin" / "spark-class"), f"{_DEPLOY}.{command[0]}", *command[1:], "--webui-port", "0"]
            ),
            log=host.folder / "spark.log",
            cwd=host.folder,
            env={**os.environ, **environment},
        )
        self._processes[name] = SupervisedProcess(launch)
        port = 7077 if name == "master" else 7078
        until(lambda: answers(host.address, port), 60, f"Spark's {name}")

    def spark_settings(self, driver: Host) -> dict[str, str]:
        """Return what a driver on a host has to set."""
        return {
            "spark.master": self.master,
            "spark.driver.host": driver.address,
            "spark.driver.bindAddress": driver.address,
            "spark.driver.memory": "700m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "spark.executor.extraClassPath": ":".join(map(str, spark_packages())),
            # an executor that is cut off is given up within seconds, and its tasks run elsewhere
            "spark.executor.heartbeatInterval": "2s",
            "spark.network.timeout": "12s",
            "spark.rpc.askTimeout": "12s",
            "spark.network.timeoutInterval": "3s",
            "spark.storage.blockManagerHeartbeatTimeoutMs": "10000",
            "spark.task.maxFailures": "4",
            **(self.store.session_settings() if self.store else {}),
        }
