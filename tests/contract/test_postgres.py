"""The contract, held by PostgreSQL: from the spool, staged by the tasks, and task by task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from psycopg import sql

from epochsink.postgres import Postgres
from epochsink.sink import Epoch
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import OneSink, SinkRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_postgres import Truth

    from epochsink_devkit.services import PostgresService

MODES: dict[str, dict[str, Any]] = {
    "prepared": {"commit": "prepared"},
    "staged": {"commit": "staged"},
    "task by task": {"commit": "prepared", "atomic": False},
    "counters": {"commit": "prepared", "key": "id", "accumulate": {"seen": "sum"}},
    "counters, staged": {"commit": "staged", "key": "id", "accumulate": {"seen": "sum"}},
}


class PostgresRig(SinkRig):
    """A table without a key, so that a row that comes twice is seen twice; or one that counts the rows of a key."""

    def __init__(self, sink: Postgres, folder: Path, truth: Truth, schema: str) -> None:
        super().__init__(sink, folder)
        self._truth = truth
        self._schema = schema
        self.keeping = OneSink.of(sink).begin(Epoch(0, ""), self.schema()).keeping

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        columns = {"id": pa.array(rows, pa.int64()), "seen": pa.array([1] * len(rows), pa.int64())}
        return pa.RecordBatch.from_pydict(columns)

    def visible(self) -> list[int]:
        return [number for number, seen in sorted(self._truth.rows(f'"{self._schema}".target')) for _ in range(seen)]

    def lose_prepared(self) -> None:
        for gid in self._truth.prepared():
            self._truth.execute(f"ROLLBACK PREPARED '{gid}'")
        for table in self._truth.staging(self._schema):
            self._truth.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._schema, table)).as_string())

    def leftovers(self) -> list[str]:
        return [*self._truth.prepared(), *self._truth.staging(self._schema)]


class TestPostgres(SinkContract):
    """The ways of PostgreSQL."""

    @pytest.fixture(params=MODES)
    def rig(
        self,
        request: pytest.FixtureRequest,
        postgres: PostgresService,
        pg_truth: Truth,
        pg_schema: str,
        tmp_path: Path,
    ) -> Iterator[PostgresRig]:
        options = MODES[request.param]
        unique = "PRIMARY KEY" if "key" in options else ""
        pg_truth.execute(f'CREATE TABLE "{pg_schema}".target (id bigint {unique}, seen bigint)')
        sink = Postgres(postgres.dsn, table=(pg_schema, "target"), marker_schema=pg_schema, **options)
        rig = PostgresRig(sink, tmp_path, pg_truth, pg_schema)
        yield rig
        rig.close()
