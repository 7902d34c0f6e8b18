"""One query into a topic, a table and an index, on servers that can be set back to an earlier state."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
import pytest
from elasticsearch import Elasticsearch as Client
from harness import make_topic
from pyspark.errors import StreamingQueryException
from streams import Boom, Stream, raising_after
from typer.testing import CliRunner

import epochsink
from epochsink import Elasticsearch, Kafka, Postgres
from epochsink.cli.app import app
from epochsink.errors import EpochsinkError
from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService
    from epochsink_devkit.services.local import LocalService

NAMES: Final = ("topic", "table", "search")


@dataclass(frozen=True)
class Servers:
    """The three of them."""

    kafka: KafkaService
    postgres: PostgresService
    elasticsearch: ElasticsearchService


class Backup:
    """A copy of a server's files, made while it is stopped, as an operator makes it."""

    def __init__(self, service: LocalService, folder: Path) -> None:
        self._service = service
        self._copy = folder / service.name
        service.stop()
        _copy(service.data, self._copy)
        service.start()

    def restore(self) -> None:
        """Set the server back."""
        self._service.kill()
        shutil.rmtree(self._service.data)
        _copy(self._copy, self._service.data)
        self._service.start()


def _copy(source: Path, target: Path) -> None:
    # with owners: PostgreSQL runs under another account
    subprocess.run(["/bin/cp", "-a", str(source), str(target)], check=True)


class ThreeTargets(Stream):
    """A stream of small files whose epochs go to a topic, a table and an index of its own, none of which has a key."""

    def __init__(self, spark: SparkSession, folder: Path, servers: Servers, name: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(spark, folder)
        self.servers = servers
        self.name = name
        self.more_sinks: dict[str, Sink] = {}
        make_topic(servers.kafka.bootstrap_servers, name)
        self.sql(f"CREATE TABLE {name} (id bigint, word text, at timestamptz)")

    def copy(self, folder: Path) -> Self:
        """Return the same query on a copy of its checkpoint: the same input, the same targets."""
        twin = object.__new__(type(self))
        twin.__dict__ |= {**self.__dict__, "folder": folder, "checkpoint": folder / "checkpoint", "_made": []}
        folder.mkdir()
        shutil.copytree(self.checkpoint, twin.checkpoint)
        return twin

    def sinks(self) -> dict[str, Sink]:
        """Return the query's sinks."""
        servers = self.servers
        made: dict[str, Any] = {
            "topic": Kafka(bootstrap_servers=servers.kafka.bootstrap_servers, topic=self.name),
            "table": Postgres(servers.postgres.dsn, table=self.name),
            "search": Elasticsearch(servers.elasticsearch.url, index=self.name, create={"number_of_shards": 1}),
        }
        return made | self.more_sinks

    def epochs(self, *numbers: int) -> None:
        """Run epochs of two rows each to their end."""
        for number in numbers:
            self.put(ids(number))
        self.goes_on()

    def goes_on(self, **options: Any) -> None:
        """Start the query, let it process what there is, and end."""
        self.run(self.exactly_once(self.sinks(), **options))

    def stops(self, **options: Any) -> EpochsinkError:
        """Start the query, which stops with an error of this package; return that."""
        once = self.exactly_once(self.sinks(), **options)
        with pytest.raises((EpochsinkError, StreamingQueryException)) as stopped:
            self.run(once)
        if isinstance(stopped.value, EpochsinkError):
            return stopped.value
        told = re.search(r"epochsink\.errors\.(\w+): (.*?)\n  Hint: (.*?)\n", str(stopped.value), re.DOTALL)
        assert told is not None, stopped.value
        kind: type[EpochsinkError] = getattr(epochsink, told[1])
        return kind(told[2], hint=told[3])

    def dies_prepared(self, number: int) -> None:
        """Run one more epoch, and end when it is recorded in all sinks, so that Spark never decides it."""
        self.put(ids(number))
        once = self.exactly_once(self.sinks())
        once.recover(self.spark)
        with pytest.raises(StreamingQueryException, match=Boom.__name__):
            self.by_hand(raising_after(once, number)).awaitTermination()
        once.await_committed()
        assert number not in self.committed()

    def follow(self, error: EpochsinkError, *more: str) -> str:
        """Type the first command of an error's hint as it stands; return what was printed."""
        found = re.search(r"epochsink (?:accept|resolve|abandon|orphans) [^,;]*", error.hint)
        assert found is not None, error
        words = [word for word in shlex.split(found[0]) if not word.startswith("MODULE")][1:]
        done = CliRunner().invoke(app, [*words, *more, "--yes"])
        assert done.exit_code == 0, (words, done.output)
        return done.output

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement in the database; return its rows."""
        with psycopg.connect(self.servers.postgres.dsn, autocommit=True) as connection:
            found = connection.execute(statement.encode(), values)
            return found.fetchall() if found.description else []

    def query_id(self) -> str:
        """Return the query's id."""
        return str(json.loads((self.checkpoint / "metadata").read_text())["id"])

    def holds(self, *numbers: int, **other: Iterable[int]) -> None:
        """Assert that readers of each target see the rows of these epochs, each once; ``other`` names other epochs."""
        expected = {name: sorted(i for number in other.get(name, numbers) for i in ids(number)) for name in NAMES}
        assert self.visible() == expected

    def visible(self) -> dict[str, list[int]]:
        """Return the ids that readers see in each target, a duplicate as often as it is there."""
        return {"topic": sorted(self._topic()), "table": sorted(self._table()), "search": sorted(self._search())}

    def _topic(self) -> Iterator[int]:
        reader = KafkaReader(self.servers.kafka.bootstrap_servers, self.name)
        return (json.loads(value)["id"] for value in reader.values())

    def _table(self) -> Iterator[int]:
        return (number for (number,) in self.sql(f"SELECT id FROM {self.name}"))  # noqa: S608 - our own name

    def _search(self) -> Iterator[int]:
        with Client(self.servers.elasticsearch.url) as client:
            client.indices.refresh(index=self.name)
            found = client.search(index=self.name, size=1000, source_includes=["id"])
        return (hit["_source"]["id"] for hit in found["hits"]["hits"])


def ids(number: int) -> tuple[int, int]:
    """Return the ids of an epoch's rows."""
    return 2 * number, 2 * number + 1
