"""One query into sinks with many of the options that change what an epoch does to its target, killed at random.

    python -m proof.options --kills 20 [--connect] [--seed N] [--keep FOLDER]

The driver, its JVM, a Python worker or one of the three services gets SIGKILL; on Spark Connect the client, the server,
the process that calls foreachBatch, a worker or one of the services. After each kill, and once the input is
drained, what the targets hold is compared with the source: rows that are lost, doubled, or there before their epoch was
decided. The data stream rolls over between runs, and the second half of the runs has one more column.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from elasticsearch import Elasticsearch
from harness import Harness, make_topic
from part_targets import ASIDE, KEY, PLACE, Findings, PartTargets, Place
from random_kills import CLASSIC, CONNECT, Killer, kill_plan

from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres, LocalRegistry
from epochsink_devkit.services.artifacts import spark_avro, spark_packages
from proof.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKLOG: Final = 360
STREAM: Final = "logs"
UNTOUCHED: Final = "untouched"
"""An ingest pipeline. The development server has no processors, so it has none."""


@dataclass
class Servers:
    """All of them, and what makes their targets."""

    kafka: LocalKafka
    postgres: LocalPostgres
    elasticsearch: LocalElasticsearch
    registry: LocalRegistry

    @property
    def part(self) -> PartTargets:
        """Those that cannot take all rows, and the one that adds them up."""
        return PartTargets(self.kafka.bootstrap_servers, self.postgres.dsn, self.elasticsearch.url)

    def make_targets(self) -> None:
        """Make tables, topic and data stream; the indices are made by the sink."""
        with psycopg.connect(self.postgres.dsn, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE newest (key bigint PRIMARY KEY, src_part int, src_off bigint, kver bigint)"
            )
            connection.execute("CREATE TABLE wide (src_part int)")
            connection.execute("CREATE TABLE tasks (src_part int, src_off bigint)")
        make_topic(self.kafka.bootstrap_servers, "avro")
        self.part.make()
        with closing(Elasticsearch(self.elasticsearch.url)) as client:
            client.indices.put_index_template(
                name=STREAM,
                index_patterns=[STREAM],
                data_stream={},
                template={"settings": {"number_of_replicas": 0}, "mappings": {"properties": {"n": {"type": "long"}}}},
            )
            # the development server has no API for data streams: a refused document makes the stream
            client.bulk(index=STREAM, operations=[{"create": {}}, {"n": "no number"}])
            client.ingest.put_pipeline(id=UNTOUCHED, processors=[])

    def sinks(self, *, wider: bool) -> dict[str, dict[str, Any]]:
        """Return the sinks, as `pipeline.Spec` has them."""
        postgres = {"kind": "Postgres", "dsn": self.postgres.dsn}
        search = {"kind": "Elasticsearch", "hosts": self.elasticsearch.url}
        more = ["kver * 2 AS doubled"] if wider else []
        avro = {
            "value": {"registry": self.registry.url, "subject": "avro-value"},
            "key": {"registry": self.registry.url, "subject": "avro-key", "columns": "key"},
        }
        return {
            "routed": {
                **search,
                "index_by": "concat('part-', src_part)",
                "key": ["src_part", "key"],
                "routing": "src_part",
                "pipeline": UNTOUCHED,
                "order_by": "kver",
                "delete_when": "op = 'D'",
                "create": {"number_of_shards": 2, "number_of_replicas": 0},
            },
            "stream": {**search, "index": STREAM, "select": [*PLACE, "timestamp_micros(src_off + 1) AS `@timestamp`"]},
            "newest": {
                **postgres,
                "table": "newest",
                "key": ["key"],
                "select": [f"{KEY} AS key", *PLACE, "kver"],
                "newer_wins": "kver",
                "skip_unchanged": True,
                "delete_when": "op = 'D'",
                **ASIDE,
            },
            "wide": {**postgres, "table": "wide", "select": [*PLACE, "op", *more], "add_columns": True},
            "tasks": {**postgres, "table": "tasks", "select": PLACE, "atomic": False},
            "avro": {
                "kind": "Kafka",
                "bootstrap_servers": self.kafka.bootstrap_servers,
                "topic": "avro",
                "select": [*PLACE, "key", "op", *more],
                "avro": avro,
            },
            **self.part.sinks(),
        }

    def kill_one(self, chance: random.Random) -> str:
        """SIGKILL to one of the services, which comes back with its data."""
        name = chance.choice(["kafka", "postgres", "elasticsearch"])
        service = getattr(self, name)
        service.kill()
        service.start()
        return name

    def roll_over(self) -> None:
        """Let the data stream go on in a new backing index."""
        with closing(Elasticsearch(self.elasticsearch.url)) as client:
            client.indices.rollover(alias=STREAM)


class Targets(PartTargets):
    """All of them."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers.kafka.bootstrap_servers, servers.postgres.dsn, servers.elasticsearch.url)
        decode = AvroDeserializer(SchemaRegistryClient({"url": servers.registry.url}))
        self._decoded = lambda value: decode(value, None)

    def appended(self) -> dict[str, Counter[Place]]:
        """Return how often each row is in the sinks that only append, with those among its dead letters."""
        stream = Counter((hit["src_part"], hit["src_off"]) for hit in self._documents(STREAM))
        wide = Counter[Place](self._rows("SELECT src_part, src_off FROM wide"))
        return super().appended() | {
            "stream": stream,
            "wide": wide,
            "tasks": Counter[Place](self._rows("SELECT src_part, src_off FROM tasks")),
            "avro": Counter(self._messages()),
        }

    def without_key(self) -> dict[str, Counter[Place]]:
        """Return how often each row is among the dead letters of a sink of which all rows without a key are."""
        return {"letters of newest": self._letters("newest")}

    def keyed(self) -> dict[str, dict[int, Place]]:
        """Return the place of the row that is stored for each key; a key of two documents has the place (-1, -1)."""
        newest = {key: (part, off) for key, part, off in self._rows("SELECT key, src_part, src_off FROM newest")}
        routed: dict[int, Place] = {}
        for hit in self._documents("part-*"):
            routed[hit["key"]] = (-1, -1) if hit["key"] in routed else (hit["src_part"], hit["src_off"])
        return {"newest": newest, "routed": routed}

    def _messages(self) -> Iterator[Place]:
        reader = KafkaReader(self._servers, "avro")
        for value in reader.values():
            row = self._decoded(value)  # type: ignore[no-untyped-call]
            yield row["src_part"], row["src_off"]


def prove(folder: Path, servers: Servers, kills: list[str], chance: random.Random, *, remote: bool) -> dict[str, Any]:
    """Kill one run after another, look after each, let the last one end; return the figures of the record."""
    servers.make_targets()
    jars = {"spark.driver.extraClassPath": ":".join(map(str, (*spark_packages(), *spark_avro())))}
    findings, total = Findings(Counter()), len(kills)
    made = servers.sinks(wider=False)
    with Harness(folder, servers.kafka, "source", sinks=made, settings=jars, remote=remote) as harness:
        targets = Targets(servers)

        def kill_service() -> None:
            harness.log.write("killed", what=servers.kill_one(chance), pid=0)

        killer = Killer(harness, chance, BACKLOG, kill_service)
        while kills:
            if len(kills) == total // 2:
                # no epoch may be pending: a prepared transaction would hold the table's lock against the new column
                harness.drain()
                made |= servers.sinks(wider=True)
            killer.kill_all([kills.pop()])
            findings.early(targets, harness.watch)
            if chance.random() < 1 / 3:
                servers.roll_over()
            print(f"{total - len(kills)} of {total}: {harness.watch.decided()} {findings.shown}", flush=True)  # noqa: T201
        harness.drain()
        ends = harness.watch.decided()
        findings.final(targets, ends)
        return {
            "kills": total,
            "source rows": sum(ends.values()),
            "epochs": harness.watch.epochs,
            "drivers": harness.runs,
            "dead letters": findings.letters,
            "reads": findings.looks + 1,
            "ledger entries": harness.replay(),
            "anomalies": findings.shown,
        }


def main() -> int:
    """Run what the command line says; return 1 if rows are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--connect", action="store_true", help="on Spark Connect")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", type=Path, help="the folder of the records")
    said = parser.parse_args()
    chance, record = random.Random(said.seed), Record("options on Connect" if said.connect else "options", said.seed)
    kills = kill_plan(chance, (*CONNECT, "broker") if said.connect else CLASSIC, said.kills)
    print(f"seed {said.seed}: {', '.join(reversed(kills))}", flush=True)  # noqa: T201 - to repeat it
    with ExitStack() as stack:
        started = [
            stack.enter_context(kind()) for kind in (LocalKafka, LocalPostgres, LocalElasticsearch, LocalRegistry)
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-options-")))
        figures = prove(folder, Servers(*started), kills, chance, remote=said.connect)  # type: ignore[arg-type] # in this order
    print(figures)  # noqa: T201
    if said.keep:
        record.keep(said.keep, figures)
    return 1 if figures["anomalies"] else 0


if __name__ == "__main__":
    sys.exit(main())
