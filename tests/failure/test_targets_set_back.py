"""Targets that are set back to an earlier state: the query stops, says so, and goes on when that has been settled.

One Spark session, and one query into Kafka, PostgreSQL and Elasticsearch for each case, on servers of this file alone.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from three_targets import NAMES, Backup, Servers, ThreeTargets, ids
from typer.testing import CliRunner

from epochsink import Postgres
from epochsink.cli.app import app
from epochsink.errors import PrepareFailed, WentBack
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_services import FreshName
    from pyspark.sql import SparkSession

    Make = Callable[[], ThreeTargets]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with (
        LocalKafka(short_lived=True) as kafka,
        LocalPostgres() as postgres,
        LocalElasticsearch(short_lived=True) as elasticsearch,
    ):
        yield Servers(kafka, postgres, elasticsearch)


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path, servers: Servers, fresh_index: FreshName) -> Iterator[Make]:
    made: list[ThreeTargets] = []

    def query() -> ThreeTargets:
        made.append(ThreeTargets(spark, tmp_path / f"query-{len(made)}", servers, fresh_index("goes_back")))
        return made[-1]

    yield query
    for each in made:
        each.end()


def dump(query: ThreeTargets) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Return the rows of the query's table and its markers, as a dump has them."""
    mine = f"SELECT * FROM epochsink.marker WHERE query_id = '{query.query_id()}'"  # noqa: S608 - our own id
    return [
        (query.name, query.sql(f"SELECT * FROM {query.name}")),  # noqa: S608 - our own name
        ("epochsink.marker", query.sql(mine)),
    ]


def restore(query: ThreeTargets, dumped: list[tuple[str, list[tuple[Any, ...]]]]) -> None:
    """Put a dump's rows in the place of what is there now, as loading it into the same database does."""
    query.sql(f"DELETE FROM {query.name}")  # noqa: S608 - our own name
    query.sql("DELETE FROM epochsink.marker WHERE query_id = %s", query.query_id())
    for table, rows in dumped:
        for row in rows:
            query.sql(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", *row)  # noqa: S608 - likewise


def test_a_server_that_is_set_back_to_a_copy_of_its_files_stops_the_query(
    make: Make, servers: Servers, tmp_path: Path
) -> None:
    """Each server in turn, under a query of its own that no other server's copy lacks an epoch of."""
    queries = [make() for _ in NAMES]
    for query in queries:
        query.epochs(0)
    running = (servers.kafka, servers.postgres, servers.elasticsearch)
    with ThreadPoolExecutor() as pool:
        backups = list(pool.map(lambda server: Backup(server, tmp_path), running))
    for query, name, backup in zip(queries, NAMES, backups, strict=True):
        query.epochs(1, 2)
        backup.restore()
        query.put(ids(3))
        refused = query.stops()
        assert isinstance(refused, WentBack)
        assert f"sink '{name}'" in refused.message
        assert "the target is the older copy" in refused.message
        assert "the rows of epochs 1 to 2 are missing in it" in refused.message
        query.holds(0, 1, 2, **{name: [0]})
        query.follow(refused)
        query.goes_on()
        query.holds(0, 1, 2, 3, **{name: [0, 3]})


def test_a_database_that_is_restored_from_a_dump_stops_the_query(make: Make) -> None:
    query = make()
    query.epochs(0)
    dumped = dump(query)
    query.epochs(1)
    newer = dump(query)
    restore(query, dumped)
    query.put(ids(2))
    refused = query.stops()
    assert isinstance(refused, WentBack)
    assert "the target is the older copy" in refused.message
    assert "put the newer state back" in refused.hint
    restore(query, newer)
    query.goes_on()
    query.holds(0, 1, 2)


def test_a_database_that_is_restored_while_the_query_runs_stops_it(make: Make) -> None:
    query = make()
    query.epochs(0)
    dumped = dump(query)
    once = query.exactly_once(query.sinks())
    running = query.start_endless(once)
    query.put(ids(1))
    running.processAllAvailable()
    restore(query, dumped)
    query.put(ids(2))
    with pytest.raises(Exception, match="the target is the older copy"):
        running.processAllAvailable()
    with pytest.raises(Exception, match="the target is the older copy"):
        running.awaitTermination()
    query.holds(0, 1, table=[0])
    query.follow(query.stops())
    query.goes_on()
    query.holds(0, 1, 2, table=[0, 2])


def test_a_successor_is_told_what_its_dead_predecessor_holds(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epochsink.spark.epoch_attempts.ATTEMPTS", 1)
    query = make()
    keyed = f"{query.name}_keyed"
    query.sql(f"CREATE TABLE {keyed} (id bigint PRIMARY KEY, word text, at timestamptz)")
    dsn, seconds = query.servers.postgres.dsn, 3.0
    query.more_sinks = {
        "table": Postgres(dsn, table=query.name, timeout=seconds),
        "keyed": Postgres(dsn, table=keyed, key=["id"], timeout=seconds),
    }
    query.dies_prepared(0)
    successor = query.copy(tmp_path / "successor")
    shutil.rmtree(successor.checkpoint)
    refused = successor.stops()
    assert isinstance(refused, PrepareFailed)
    assert "it belongs to another query, 'checkpoint/table', which has not committed it" in refused.message
    assert "epochsink abandon ITS_CHECKPOINT" in refused.hint
    monkeypatch.setitem(sys.modules, "dead_query", SimpleNamespace(SINKS=query.sinks()))
    typed = ["abandon", str(query.checkpoint), "--sinks", "dead_query:SINKS", "--yes"]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
    assert "END epoch 0, recorded and not decided" in done.output
    successor.goes_on()
    query.holds(0)
    assert query.sql(f"SELECT id FROM {keyed} ORDER BY 1") == [(i,) for i in ids(0)]  # noqa: S608 - our own name
