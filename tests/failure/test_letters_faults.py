"""Each fault at each request of a retry of dead letters, on a real server; then a retry without any."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from elasticsearch_rig import Rig, rendered

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.postgres import Postgres
from epochsink.sink import Outcome
from request_faults import framings
from request_faults.letters import DROP, EPOCH, FATES, LETTERS, RETRY, hits, play
from request_faults.wire import Fate, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fix_postgres import MakeDriver, Truth
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService, PostgresService
    from request_faults.letters import Played, Requests, Scene

# the child only ever runs its own sessions
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SECONDS = 20


class InTable:
    """A table; each play puts the same letters back."""

    framing = framings.Postgres
    once = True
    # a row that is written twice shows without a key, one that is replaced with one
    fates: Sequence[Fate] = FATES
    beside: Sequence[str] = (RETRY, DROP)

    def __init__(self, service: PostgresService, schema: str, truth: Truth, make: MakeDriver, **options: Any) -> None:
        self.port = service.port
        self._truth = truth
        self._schema = schema
        self._table = f"{schema}.t"
        self._options = {
            "table": self._table,
            "marker_schema": schema,
            "on_rejected": "dead_letter",
            "spool": True,
            "timeout": SECONDS,
            **options,
        }
        self._dsn = service.dsn
        key = "PRIMARY KEY" if "key" in options else ""
        truth.execute(f"CREATE TABLE {self._table} (id text {key}, ver bigint, CONSTRAINT rule CHECK (ver < 0))")
        given = dict(self._options)
        self._driver = make(given.pop("table"), _rows((LETTERS[0], 1)), **given)
        self.identity = self._driver.identity
        if "key" in options:
            self.fates, self.beside = (Fate.PAUSED,), (EPOCH,)
        self._epoch = 0
        self._apply(*((each, 1) for each in LETTERS[:2]))
        self._apply(*((each, 1) for each in LETTERS[2:]))
        truth.execute(f"ALTER TABLE {self._table} DROP CONSTRAINT rule")
        truth.execute(f"CREATE TABLE {schema}.saved AS TABLE {schema}.dead_letter")
        assert truth.count(f"{schema}.saved") == len(LETTERS)

    def _apply(self, *rows: tuple[str, int]) -> None:
        written, parts = self._driver.prepare(self._epoch, _rows(*rows))
        (verdict,) = self._driver.commit(written, parts)
        assert verdict.outcome is Outcome.COMMITTED
        self._driver.committer.finish(written.epoch, parts)
        self._epoch += 1

    def sink(self, port: int) -> Postgres:
        dsn = psycopg.conninfo.make_conninfo(self._dsn, port=port, sslmode="disable", gssencmode="disable")
        return Postgres(dsn, **self._options)

    def lay(self) -> None:
        letters = f"{self._schema}.dead_letter"
        self._truth.execute(f"DELETE FROM {self._table}")  # noqa: S608 - a name that the test made
        self._truth.execute(f"DELETE FROM {letters}")  # noqa: S608 - likewise
        self._truth.execute(f"INSERT INTO {letters} OVERRIDING SYSTEM VALUE TABLE {self._schema}.saved")

    def strikes(self, requests: Requests) -> Requests:
        """Choose those of the first transaction: the second one is like it, and a session that begins does nothing."""
        labels = [request.label for request in requests]
        return requests[labels.index("SELECT to_regclass(?)") : labels.index("COMMIT") + 1]

    def write_newer(self) -> None:
        self._apply((LETTERS[0], 2))

    def is_blocked(self) -> bool:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'epochsink%'"
        return bool(self._truth.execute(waiting))

    def flaws(self, *, dropped: bool, newer: bool) -> list[str]:
        found = self._truth.rows(self._table)
        flaws = _unlike([(each, 2 if newer and each == LETTERS[0] else 1) for each in LETTERS], found, dropped=dropped)
        if left := [*self._truth.staging(self._schema), *self._truth.prepared()]:
            flaws.append(f"left over: {left}")
        return flaws


def _rows(*given: tuple[str, int]) -> pa.RecordBatch:
    ids, versions = zip(*given, strict=True)
    return pa.record_batch({"id": pa.array(ids, pa.string()), "ver": pa.array(versions, pa.int64())})


class InIndex:
    """An index; each play has letters of its own, which the mapping refuses until it has one more field."""

    framing = framings.Http
    once = False
    fates: Sequence[Fate] = FATES
    beside: Sequence[str] = (RETRY, DROP, EPOCH)

    def __init__(self, service: ElasticsearchService, index: str) -> None:
        self.port = service.port
        self._options: dict[str, Any] = {
            "index": index,
            "key": "id",
            "timeout": SECONDS,
            "on_rejected": "dead_letter",
            "dead_letter_index": f"{index}_dead",
        }
        self._index = index
        self._client = connect(self.sink(self.port))
        mappings = {"dynamic": "strict", "properties": {"n": {"type": "long"}}}
        settings = {"number_of_replicas": 0, "refresh_interval": "-1"}
        self._client.indices.create(index=index, settings=settings, mappings=mappings)
        self._rig = Rig.joining(self.sink(self.port), pa.schema([("n", pa.int64())]))
        self.identity = self._rig.identity
        self._epoch = self._play = 0

    def close(self) -> None:
        self._rig.close()
        self._client.close()

    def _apply(self, *documents: tuple[str, dict[str, Any]]) -> None:
        self._rig.apply(self._epoch, [rendered([(f"{self._play}{key}", each) for key, each in documents])])
        self._epoch += 1

    def sink(self, port: int) -> Elasticsearch:
        return Elasticsearch(f"http://127.0.0.1:{port}", **self._options)

    def lay(self) -> None:
        self._play += 1
        field = f"f{self._play}"
        self._apply(*((each, {field: 1}) for each in LETTERS[:2]))
        self._apply(*((each, {field: 1}) for each in LETTERS[2:]))
        self._client.indices.put_mapping(index=self._index, properties={field: {"type": "long"}})

    def strikes(self, requests: Requests) -> Requests:
        """Leave out the second epoch's, which are like those of the first."""
        return [each for each in requests if (each.label.endswith("/_bulk"), each.nth) != (True, 1)]

    def write_newer(self) -> None:
        self._apply((LETTERS[0], {"n": 2}))

    def is_blocked(self) -> bool:
        return False

    def flaws(self, *, dropped: bool, newer: bool) -> list[str]:
        self._client.indices.refresh(index=self._index)
        query = {"ids": {"values": [f"{self._play}{each}" for each in LETTERS]}}
        hits = self._client.search(index=self._index, query=query)["hits"]["hits"]
        found = sorted((each["_id"], *each["_source"].values()) for each in hits)
        newest = LETTERS[0] if newer else ""
        return _unlike(
            [(f"{self._play}{each}", 2 if each == newest else 1) for each in LETTERS], found, dropped=dropped
        )


def _unlike(expected: list[tuple[str, int]], found: list[tuple[Any, ...]], *, dropped: bool) -> list[str]:
    """Return what is wrong with rows, of which some may be missing if letters were dropped."""
    if found == expected or (dropped and len(set(found)) == len(found) and set(found) <= set(expected)):
        return []
    return [f"rows: {found} instead of {expected}"]


def played(scene: Scene, mutant: str = "") -> Iterator[Played]:
    with Wire(scene.port, scene.framing) as wire:
        first = play(scene, wire, mutant=mutant)
        yield first
        for hit in hits(scene, first.requests):
            yield play(scene, wire, hit, mutant)


def check(scene: Scene) -> None:
    found = list(played(scene))
    flaws = [str(each) for each in found if each.flaws]
    assert not flaws, "\n\n".join(flaws)
    missed = [str(each.hit) for each in found[1:] if not each.struck]
    assert not missed, missed


@pytest.mark.parametrize("options", [{}, {"key": "id", "newer_wins": "ver"}], ids=["appended", "newest"])
def test_a_retry_with_a_fault_at_any_request_writes_each_row_of_a_table_once(
    options: dict[str, Any], postgres: PostgresService, pg_schema: str, pg_truth: Truth, pg_driver: MakeDriver
) -> None:
    check(InTable(postgres, pg_schema, pg_truth, pg_driver, **options))


def test_a_retry_with_a_fault_at_any_request_writes_each_document_once(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    with closing(InIndex(elasticsearch, fresh_index())) as scene:
        check(scene)


def test_a_retry_that_commits_each_statement_is_noticed(
    postgres: PostgresService, pg_schema: str, pg_truth: Truth, pg_driver: MakeDriver
) -> None:
    scene = InTable(postgres, pg_schema, pg_truth, pg_driver)
    assert any(each.flaws for each in played(scene, "each statement commits"))


@pytest.mark.parametrize("mutant", ["writes a version of its own", "deletes the letters first"])
def test_a_retry_of_documents_in_another_order_or_version_is_noticed(
    mutant: str, elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    with closing(InIndex(elasticsearch, fresh_index())) as scene:
        assert any(each.flaws for each in played(scene, mutant))
