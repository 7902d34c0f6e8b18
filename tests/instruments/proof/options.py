"""One query into sinks with many of the options that change what an epoch does to its target, killed at random.

    python -m proof.options --kills 20 [--seed N] [--keep FOLDER]

The driver, its JVM, a Python worker or one of the three services gets SIGKILL. After each kill, and once the input is
drained, what the targets hold is compared with the source: rows that are lost, doubled, or there before their epoch was
decided. The data stream rolls over between runs, and the second half of the runs has one more column.
"""

from __future__ import annotations

import argparse
import json
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
from elasticsearch.helpers import scan
from harness import WORKLOAD, Harness, make_topic
from random_kills import CLASSIC, Killer, kill_plan

from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres, LocalRegistry
from epochsink_devkit.services.artifacts import spark_avro, spark_packages
from proof.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import LiteralString

BACKLOG: Final = 360
STREAM: Final = "logs"
UNTOUCHED: Final = "untouched"
"""An ingest pipeline. The development server has no processors, so it has none."""

PART: Final = "some-rows"
"""A topic and an index that cannot take all rows; likewise the table "part"."""
LETTERS: Final = f"{PART}.dead_letter"
"""The topic and the index of their dead letters."""
NO_KEY: Final = "src_off % 7 = 3"
WRONG: Final = "src_off % 11 = 5"
"""Too large for the topic, refused by the table's constraint, no address for the index."""

Place = tuple[int, int]
"""A row's partition and offset in the source."""


@dataclass
class Servers:
    """All of them, and what makes their targets."""

    kafka: LocalKafka
    postgres: LocalPostgres
    elasticsearch: LocalElasticsearch
    registry: LocalRegistry

    def make_targets(self) -> None:
        """Make tables, topic and data stream; the indices are made by the sink."""
        with psycopg.connect(self.postgres.dsn, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE newest (key bigint PRIMARY KEY, src_part int, src_off bigint, kver bigint)"
            )
            connection.execute(
                'CREATE TABLE counts (key bigint PRIMARY KEY, "rows" bigint, total bigint, latest bigint)'
            )
            connection.execute("CREATE TABLE wide (src_part int)")
            connection.execute("CREATE TABLE tasks (src_part int, src_off bigint)")
            # without a unique key, which would hide doubled rows
            connection.execute(
                f"CREATE TABLE part (src_part int, src_off bigint CHECK (NOT ({WRONG})), id bigint NOT NULL)"
            )
        make_topic(self.kafka.bootstrap_servers, "avro")
        make_topic(self.kafka.bootstrap_servers, PART, {"max.message.bytes": "2000"})
        with closing(Elasticsearch(self.elasticsearch.url)) as client:
            client.indices.put_index_template(
                name=STREAM,
                index_patterns=[STREAM],
                data_stream={},
                template={"settings": {"number_of_replicas": 0}, "mappings": {"properties": {"n": {"type": "long"}}}},
            )
            # the development server has no API for data streams: a refused document makes the stream
            client.bulk(index=STREAM, operations=[{"create": {}}, {"n": "no number"}])
            client.indices.create(
                index=PART,
                settings={"number_of_replicas": 0},
                mappings={"properties": {"address": {"type": "ip"}}},
            )
            client.ingest.put_pipeline(id=UNTOUCHED, processors=[])

    def sinks(self, *, wider: bool) -> dict[str, dict[str, Any]]:
        """Return the sinks, as `pipeline.Spec` has them."""
        place = ["src_part", "src_off"]
        postgres = {"kind": "Postgres", "dsn": self.postgres.dsn}
        search = {"kind": "Elasticsearch", "hosts": self.elasticsearch.url}
        more = ["kver * 2 AS doubled"] if wider else []
        avro = {
            "value": {"registry": self.registry.url, "subject": "avro-value"},
            "key": {"registry": self.registry.url, "subject": "avro-key", "columns": "key"},
        }
        aside = {"on_rejected": "dead_letter", "letters_limit": 0.9}
        key = f"CASE WHEN NOT ({NO_KEY}) THEN key END"
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
            "stream": {**search, "index": STREAM, "select": [*place, "timestamp_micros(src_off + 1) AS `@timestamp`"]},
            "newest": {
                **postgres,
                "table": "newest",
                "key": ["key"],
                "select": [f"{key} AS key", *place, "kver"],
                "newer_wins": "kver",
                "skip_unchanged": True,
                "delete_when": "op = 'D'",
                **aside,
            },
            "counts": {
                **postgres,
                "table": "counts",
                "key": ["key"],
                "select": ["key", "1L AS rows", "src_off AS total", "kver AS latest"],
                "accumulate": {"rows": "sum", "total": "sum", "latest": "max"},
            },
            "wide": {**postgres, "table": "wide", "select": [*place, "op", *more], "add_columns": True},
            "tasks": {**postgres, "table": "tasks", "select": place, "atomic": False},
            "avro": {
                "kind": "Kafka",
                "bootstrap_servers": self.kafka.bootstrap_servers,
                "topic": "avro",
                "select": [*place, "key", "op", *more],
                "avro": avro,
            },
            "topic": {
                "kind": "Kafka",
                "bootstrap_servers": self.kafka.bootstrap_servers,
                "topic": PART,
                "key": key,
                "select": [*place, "key", f"repeat('x', CASE WHEN {WRONG} THEN 3000 ELSE 1 END) AS filler"],
                **aside,
            },
            "table": {**postgres, "table": "part", "select": [*place, f"{key} AS id"], **aside},
            "index": {
                **search,
                "index": PART,
                "key": "id",
                "select": [
                    *place,
                    f"CASE WHEN NOT ({NO_KEY}) THEN 2 * src_off + src_part END AS id",
                    f"CASE WHEN {WRONG} THEN 'none' ELSE '127.0.0.1' END AS address",
                ],
                "dead_letter_index": LETTERS,
                **aside,
            },
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


class Targets:
    """What the targets hold."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        decode = AvroDeserializer(SchemaRegistryClient({"url": servers.registry.url}))
        self._decoded = lambda value: decode(value, None)

    def appended(self) -> dict[str, Counter[Place]]:
        """Return how often each row is in the sinks that only append, with those among its dead letters."""
        stream = Counter((hit["src_part"], hit["src_off"]) for hit in self._documents(STREAM))
        wide = Counter[Place](self._rows("SELECT src_part, src_off FROM wide"))
        return {
            "stream": stream,
            "wide": wide,
            "tasks": Counter[Place](self._rows("SELECT src_part, src_off FROM tasks")),
            "avro": Counter(self._messages()),
            "topic": Counter(self._topic()),
            "table": Counter[Place](self._rows("SELECT src_part, src_off FROM part")) + self._letters("table"),
            "index": Counter(self._index()),
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

    def counts(self) -> dict[int, tuple[int, int, int]]:
        """Return what has accumulated for each key."""
        found = self._rows('SELECT key, "rows", total, latest FROM counts')
        return {key: (rows, total, latest) for key, rows, total, latest in found}

    def _rows(self, query: LiteralString, *values: object) -> list[Any]:
        with psycopg.connect(self._servers.postgres.dsn) as connection:
            try:
                return connection.execute(query, values).fetchall()
            except psycopg.errors.UndefinedColumn:  # which check() adds
                return []

    def _documents(self, index: str) -> Iterator[dict[str, Any]]:
        with closing(Elasticsearch(self._servers.elasticsearch.url, request_timeout=60)) as client:
            client.cluster.health(wait_for_status="yellow", timeout="60s")
            client.indices.refresh(index=index)
            yield from (hit["_source"] for hit in scan(client, index=index, request_timeout=60))

    def _messages(self) -> Iterator[Place]:
        reader = KafkaReader(self._servers.kafka.bootstrap_servers, "avro")
        for value in reader.values():
            row = self._decoded(value)  # type: ignore[no-untyped-call]
            yield row["src_part"], row["src_off"]

    def _topic(self) -> Iterator[Place]:
        for topic in (PART, LETTERS):
            for value in KafkaReader(self._servers.kafka.bootstrap_servers, topic).values():
                told = json.loads(value)
                yield _place(json.loads(told["value"]) if topic == LETTERS else told, topic)

    def _index(self) -> Iterator[Place]:
        yield from (_place(row, PART) for row in self._documents(PART))
        for letter in self._documents(LETTERS):
            yield _place(json.loads(letter["source"]), LETTERS)

    def _letters(self, sink: str) -> Counter[Place]:
        """Return the dead letters of a table."""
        kept = self._rows('SELECT "row" FROM epochsink.dead_letter WHERE sink = %s', sink)
        return Counter((row["src_part"], row["src_off"]) for (row,) in kept)


def _place(row: Mapping[str, Any], target: str) -> Place:
    """Return a row's place, (-1, -1) if it is a letter and should be none, or the other way round."""
    refused = row["src_off"] % 7 == 3 or row["src_off"] % 11 == 5
    return (row["src_part"], row["src_off"]) if refused == (target == LETTERS) else (-1, -1)


@dataclass
class Findings:
    """What was found wrong, by sink and kind."""

    wrong: Counter[tuple[str, str]]
    looks: int = 0

    def early(self, targets: Targets, harness: Harness) -> None:
        """Look for rows of epochs that are not decided: what the targets hold is read before the decisions."""
        appended = targets.appended() | targets.without_key()
        keyed, counts = targets.keyed(), targets.counts()
        harness.watch.look()
        decided = harness.watch.decided()
        for name, rows in appended.items():
            self.wrong[name, "early"] += sum(off >= decided.get(part, 0) for part, off in rows)
            # a run that was killed leaves letters in the index until the next one has applied the epoch
            if name != "index":
                self.wrong[name, "doubled"] += sum(count - 1 for count in rows.values())
        for name, stored in keyed.items():
            self.wrong[name, "early"] += sum(off >= decided.get(part, 0) for part, off in stored.values())
        more = sum(rows for rows, _, _ in counts.values()) - sum(decided.values())
        self.wrong["counts", "early"] += max(0, more)
        self.looks += 1

    def final(self, targets: Targets, ends: Mapping[int, int]) -> None:
        """Compare everything with the source."""
        source = WORKLOAD.source(ends).to_pylist()
        places = {(row["src_part"], row["src_off"]) for row in source}
        without_key = {(part, off) for part, off in places if off % 7 == 3}
        for wanted, found in ((places, targets.appended()), (without_key, targets.without_key())):
            for name, rows in found.items():
                self.wrong[name, "lost"] += len(wanted - rows.keys())
                self.wrong[name, "unknown"] += len(rows.keys() - wanted)
                self.wrong[name, "doubled"] += sum(count - 1 for count in rows.values())
        for name, stored in targets.keyed().items():
            # the source is in the order of versions
            newest = {row["key"]: row for row in source if name != "newest" or row["src_off"] % 7 != 3}
            expected = {key: (row["src_part"], row["src_off"]) for key, row in newest.items() if row["op"] == "U"}
            self.wrong[name, "lost"] += len(expected.keys() - stored.keys())
            self.wrong[name, "unknown"] += len(stored.keys() - expected.keys())
            self.wrong[name, "other"] += sum(stored[key] != expected[key] for key in expected.keys() & stored.keys())
        sums: dict[int, list[int]] = {}
        for row in source:
            one = sums.setdefault(row["key"], [0, 0, 0])
            one[:] = one[0] + 1, one[1] + row["src_off"], max(one[2], row["kver"])
        counts = targets.counts()
        self.wrong["counts", "other"] += sum(counts.get(key) != tuple(one) for key, one in sums.items())
        self.wrong["counts", "unknown"] += len(counts.keys() - sums.keys())

    @property
    def shown(self) -> list[str]:
        """What is wrong."""
        return [f"{count} {kind} in {name}" for (name, kind), count in sorted(self.wrong.items()) if count]


def prove(folder: Path, servers: Servers, kills: list[str], chance: random.Random) -> dict[str, Any]:
    """Kill one run after another, look after each, let the last one end; return the figures of the record."""
    servers.make_targets()
    jars = {"spark.driver.extraClassPath": ":".join(map(str, (*spark_packages(), *spark_avro())))}
    findings, total = Findings(Counter()), len(kills)
    made = servers.sinks(wider=False)
    with Harness(folder, servers.kafka, "source", sinks=made, settings=jars) as harness:
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
            findings.early(targets, harness)
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
            "reads": findings.looks + 1,
            "ledger entries": harness.replay(),
            "anomalies": findings.shown,
        }


def main() -> int:
    """Run what the command line says; return 1 if rows are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", type=Path, help="the folder of the records")
    said = parser.parse_args()
    chance, record = random.Random(said.seed), Record("options", said.seed)
    kills = kill_plan(chance, CLASSIC, said.kills)
    print(f"seed {said.seed}: {', '.join(reversed(kills))}", flush=True)  # noqa: T201 - to repeat it
    with ExitStack() as stack:
        started = [
            stack.enter_context(kind()) for kind in (LocalKafka, LocalPostgres, LocalElasticsearch, LocalRegistry)
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-options-")))
        figures = prove(folder, Servers(*started), kills, chance)  # type: ignore[arg-type] # in this order
    print(figures)  # noqa: T201
    if said.keep:
        record.keep(said.keep, figures)
    return 1 if figures["anomalies"] else 0


if __name__ == "__main__":
    sys.exit(main())
