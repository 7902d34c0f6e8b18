"""`epochsink repair`: a target that was set back gets its retained epochs again, exactly once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import elasticsearch as vendor
import psycopg
import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from elasticsearch_rig import keyless, rendered
from streams import Stream
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.elasticsearch import Elasticsearch, applied_epochs
from epochsink.errors import Fenced, WentBack
from epochsink.identity import marker_document
from epochsink.postgres import Postgres
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.retained import Retention
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import identity_key
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import LocalElasticsearch, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName
    from pyspark.sql import SparkSession
    from typer.testing import Result

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, PostgresService

MODULE = "repaired_sinks"


def ids(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values, pa.int64())})


@pytest.fixture
def table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> Iterator[Callable[..., tuple[CheckpointKit, str]]]:
    monkeypatch.chdir(tmp_path)
    made: list[CheckpointKit] = []

    def make(retain_seconds: float = 3600.0, **options: Any) -> tuple[CheckpointKit, str]:
        name = f"{pg_schema}.orders"
        pg_truth.execute(f"CREATE TABLE {name} (id bigint{' PRIMARY KEY' if 'key' in options else ''})")
        given = {"table": name, "marker_schema": pg_schema, **options}
        (tmp_path / f"{MODULE}.py").write_text(
            f"from epochsink import Postgres\nSINKS = {{'sink': Postgres({postgres.dsn!r}, **{given!r})}}\n"
        )
        sink = Postgres(postgres.dsn, **given)
        with closing(OneSink.of(sink)) as committer:
            assert committer.check(ids(1).schema) == []
        made.append(CheckpointKit(tmp_path / "checkpoint", {"sink": sink}, retain_seconds=retain_seconds))
        return made[-1], name

    yield make
    for each in made:
        each.close()
    sys.modules.pop(MODULE, None)


def repair(kit: CheckpointKit) -> Result:
    return CliRunner().invoke(app, ["repair", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--yes"])


def set_back(truth: Truth, schema: str, name: str, above: int, *lost: int) -> None:
    truth.execute(f"DELETE FROM {schema}.marker WHERE key NOT LIKE '%%.table' AND epoch > %s", above)  # noqa: S608
    truth.execute(f"DELETE FROM {name} WHERE id = ANY (%s)", list(lost))  # noqa: S608


@pytest.mark.parametrize(
    "options", [{}, {"commit": "staged"}, {"atomic": False}], ids=["prepared", "staged", "by task"]
)
def test_a_table_that_was_set_back_gets_its_epochs_again_and_the_query_goes_on(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth, options: dict[str, Any]
) -> None:
    kit, name = table(**options)
    for number in range(4):
        kit.run(number, {"sink": ids(number)})
    set_back(pg_truth, pg_schema, name, 1, 2, 3)
    with pytest.raises(WentBack):
        kit.start()
    answer = repair(kit)
    assert answer.exit_code == 0, answer.output
    assert sorted(value for (value,) in pg_truth.rows(name)) == [0, 1, 2, 3]
    again = repair(kit)
    assert (again.exit_code, "nothing to repair" in again.output) == (1, True), answer.output + again.output
    kit.coordinator = kit.start()
    kit.run(4, {"sink": ids(4)})
    assert sorted(value for (value,) in pg_truth.rows(name)) == [0, 1, 2, 3, 4]


def test_a_query_of_spark_with_retain_goes_on_after_its_table_was_set_back_and_repaired(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pg_schema: str, pg_truth: Truth
) -> None:
    """The error that the next start raises names the command."""
    name = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {name} (id bigint)")
    given: dict[str, Any] = {"table": name, "marker_schema": pg_schema, "select": ["id"]}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sinks_of_spark.py").write_text(
        f"from epochsink import Postgres\nSINKS = {{'sink': Postgres({pg_truth.dsn!r}, **{given!r})}}\n"
    )
    stream = Stream(spark, tmp_path)
    sinks: dict[str, Sink] = {"sink": Postgres(pg_truth.dsn, **given)}
    for number in range(3):
        stream.put([number])
    stream.run(stream.exactly_once(sinks, retain="1h"))
    set_back(pg_truth, pg_schema, name, 0, 1, 2)
    with pytest.raises(WentBack, match="epochsink repair"):
        stream.run(stream.exactly_once(sinks, retain="1h"))
    command = ["repair", str(stream.checkpoint), "--sinks", "sinks_of_spark:SINKS", "--yes"]
    answer = CliRunner().invoke(app, command)
    sys.modules.pop("sinks_of_spark", None)
    assert answer.exit_code == 0, answer.output
    stream.put([3])
    # without retain= too
    stream.run(stream.exactly_once(sinks))
    assert pg_truth.rows(name) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("gone", ["its rows", "its record"])
def test_nothing_is_applied_if_an_epoch_in_between_is_not_retained(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth, gone: str
) -> None:
    kit, name = table()
    for number in range(4):
        kit.run(number, {"sink": ids(number)})
    # in the record itself are rows as few as these: here they are in a file
    lost = kit.history().epochs[2].at
    if gone == "its rows":
        kit.spool.drop(kit.query_id, lost)
    else:
        kit.spool.forget_retained(kit.query_id, str(Retention(kit.spool, kit.query_id).terms()[lost]))
    set_back(pg_truth, pg_schema, name, 0, 1, 2, 3)
    answer = repair(kit)
    assert answer.exit_code == 1
    assert "lacks the epochs from 2 or an earlier one to 3, and the rows of epoch 2 are not available" in answer.output
    assert f"epochsink accept {kit.root} 3 --sink sink" in answer.output.replace("\n", " ")
    assert pg_truth.rows(name) == [(0,)]


def test_markers_that_are_gone_altogether_prove_nothing(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth
) -> None:
    kit, name = table()
    kit.run(0, {"sink": ids(0)})
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608
    answer = repair(kit)
    assert (answer.exit_code, "no marker of this query at all" in answer.output) == (1, True), answer.output
    assert pg_truth.rows(name) == [(0,)]


def test_a_driver_that_runs_is_fenced_and_a_repair_that_is_overtaken_applies_nothing_more(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, name = table()
    for number in range(4):
        kit.run(number, {"sink": ids(number)})
    set_back(pg_truth, pg_schema, name, 0, 1, 2, 3)
    others: list[int] = []

    def another_takes(point: str) -> None:
        if point == "repair.epoch.after" and not others:
            files = LocalStorage(kit.root)
            others.append(Ledger(files, "another").take(kit.query_id, {}, -1).generation)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("epochsink.protocol.repair.reach", another_takes)
        answer = repair(kit)
    assert (answer.exit_code, "another driver has taken over this checkpoint" in answer.output) == (1, True)
    assert sorted(pg_truth.rows(name)) == [(0,), (1,)]
    assert repair(kit).exit_code == 0
    assert sorted(pg_truth.rows(name)) == [(0,), (1,), (2,), (3,)]
    with pytest.raises(Fenced, match="epochsink repair"):
        kit.coordinator.settle(4)


def test_a_repair_that_is_killed_at_one_point_after_another_is_exact(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth
) -> None:
    kit, name = table(commit="staged")
    for number in range(7):
        kit.run(number, {"sink": ids(number)})
    set_back(pg_truth, pg_schema, name, 0, *range(1, 7))
    killed(kit, "repair.epoch.before", "postgres.copied", "postgres.merged", "postgres.committed:2")
    assert repair(kit).exit_code == 0
    assert sorted(pg_truth.rows(name)) == [(number,) for number in range(7)]
    kit.coordinator = kit.start()
    assert pg_truth.prepared() == []


def killed(kit: CheckpointKit, *points: str) -> None:
    """Run the command in a process of its own once for each point, at which it kills itself."""
    program = "from epochsink.cli.app import app; app()"
    command = [sys.executable, "-c", program, "repair", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--yes"]
    for point in points:
        environment = {**os.environ, "EPOCHSINK_FAILPOINT": point}
        assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == -signal.SIGKILL


def test_a_repair_of_an_upsert_by_task_that_is_killed_at_one_point_after_another_is_exact(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth
) -> None:
    """The rows are staged under the recorded attempt. A repair that was killed has left them; they count once."""
    kit, name = table(atomic=False, key="id")
    for number in range(4):
        kit.run(number, {"sink": [ids(number), ids(100 + number)]})
    set_back(pg_truth, pg_schema, name, 0, *range(1, 4), *range(101, 104))
    killed(kit, "postgres.copied", "postgres.merged", "postgres.merged:2", "postgres.prepared", "postgres.committed:2")
    answer = repair(kit)
    assert answer.exit_code == 0, answer.output
    assert sorted(value for (value,) in pg_truth.rows(name)) == [*range(4), *range(100, 104)]
    kit.coordinator = kit.start()
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


@pytest.mark.parametrize("moment", ["repair.epoch.after", "postgres.copied"])
@pytest.mark.parametrize(
    "options", [{}, {"commit": "staged"}, {"atomic": False}], ids=["prepared", "staged", "by task"]
)
def test_a_table_that_is_set_back_again_under_a_repair_gets_no_epoch_after_the_one_that_it_lost(
    options: dict[str, Any],
    moment: str,
    table: Callable[..., tuple[CheckpointKit, str]],
    *,
    pg_schema: str,
    pg_truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second failover: the marker of the next epoch would hide from every later look that this one is missing."""
    kit, name = table(**options)
    for number in range(4):
        kit.run(number, {"sink": ids(number)})
    set_back(pg_truth, pg_schema, name, 0, 1, 2, 3)
    reached: list[str] = []

    def fail_over(point: str) -> None:
        reached.append(point)
        if point == moment and reached.count("repair.epoch.after") == 1:
            set_back(pg_truth, pg_schema, name, 0, 1)

    with monkeypatch.context() as meanwhile:
        for module in ("protocol.repair", "postgres.vote", "postgres.incoming", "postgres.writer"):
            meanwhile.setattr(f"epochsink.{module}.reach", fail_over)
        answer = repair(kit)
    assert (answer.exit_code, "no longer holds epoch 1" in answer.output) == (1, True), answer.output
    assert pg_truth.rows(name) == [(0,)]
    answer = repair(kit)
    assert answer.exit_code == 0, answer.output
    assert sorted(value for (value,) in pg_truth.rows(name)) == [0, 1, 2, 3]
    kit.coordinator = kit.start()
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


def test_a_command_that_commits_an_epoch_keeps_its_rows_for_as_long_as_the_query_said(
    table: Callable[..., tuple[CheckpointKit, str]], pg_schema: str, pg_truth: Truth
) -> None:
    """The first epoch too, before which nothing was kept that could say for how long."""
    kit, name = table(retain_seconds=1000.0)
    kit.record(0, {"sink": ids(1, 2)})
    kit.decide(0)
    recovered = CliRunner().invoke(app, ["recover", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--yes"])
    assert (recovered.exit_code, pg_truth.count(name)) == (0, 2), recovered.output
    (term,) = Retention(kit.spool, kit.query_id).terms().values()
    assert (term.epoch.number, term.until - term.done) == (0, 1_000_000)
    set_back(pg_truth, pg_schema, name, -1, 1, 2)
    answer = repair(kit)
    assert (answer.exit_code, pg_truth.count(name)) == (0, 2), answer.output


def test_the_rows_of_a_pending_epoch_are_there_when_the_time_of_its_record_is_over(
    table: Callable[..., tuple[CheckpointKit, str]],
    pg_schema: str,
    pg_truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver dies before "done", a failover loses the epoch, and the query is started after the time of retain=."""
    kit, name = table(retain_seconds=1000.0)
    kit.run(0, {"sink": ids(0)})
    kit.record(1, {"sink": ids(1, 2)})
    kit.decide(1)

    def die(point: str) -> None:
        if point == "coordinator.done.before":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("epochsink.protocol.commits.reach", die)
        with pytest.raises(KeyboardInterrupt):
            kit.coordinator.commit_decided()
    set_back(pg_truth, pg_schema, name, 0, 1, 2)
    later = time.time() + 2000
    monkeypatch.setattr("epochsink.protocol.retained.time.time", lambda: later)
    kit.coordinator = kit.start()
    assert sorted(value for (value,) in pg_truth.rows(name)) == [0, 1, 2]
    assert [term.epoch.number for term in Retention(kit.spool, kit.query_id).terms().values()] == [1]


def test_what_is_kept_is_shown_and_dropped_when_its_time_is_over_or_the_checkpoint_is_abandoned(
    table: Callable[..., tuple[CheckpointKit, str]],
) -> None:
    kit, _ = table(retain_seconds=1000.0)
    for number in range(2):
        kit.run(number, {"sink": ids(number)})
    shown = CliRunner().invoke(app, ["status", str(kit.root)])
    assert "retained" in shown.output
    assert "2 epoch(s), back to epoch 0" in shown.output
    status = json.loads(CliRunner().invoke(app, ["status", str(kit.root), "--json"]).output)
    assert [each["state"] for each in status["epochs"]] == ["done", "done"]
    assert (status["retained"]["epochs"], status["retained"]["oldest"]) == (2, 0)
    # a command has no retain=, and keeps what it finds
    recovered = CliRunner().invoke(app, ["recover", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--yes"])
    assert recovered.exit_code == 0, recovered.output
    assert len(kit.spool.retained(kit.query_id)) == 2
    abandoned = CliRunner().invoke(app, ["abandon", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--yes"])
    assert abandoned.exit_code == 0, abandoned.output
    assert (kit.spool.retained(kit.query_id), kit.spool.attempts(kit.query_id)) == ([], [])


def test_a_server_restored_from_a_copy_gets_sums_and_dead_letters_of_two_tables_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalPostgres() as server:
        options: dict[str, dict[str, Any]] = {
            "clicks": {"table": "clicks", "key": "id", "accumulate": {"n": "sum"}},
            "orders": {"table": "orders", "on_rejected": "dead_letter"},
        }

        def rows_of(query: str) -> list[tuple[Any, ...]]:
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                return connection.execute(query).fetchall()

        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE clicks (id bigint PRIMARY KEY, n bigint)")
            connection.execute("CREATE TABLE orders (id bigint CHECK (id < 100))")
        (tmp_path / f"{MODULE}.py").write_text(
            f"from epochsink import Postgres\nGIVEN = {options!r}\n"
            f"SINKS = {{name: Postgres({server.dsn!r}, **each) for name, each in GIVEN.items()}}\n"
        )
        sinks = {name: Postgres(server.dsn, **each) for name, each in options.items()}

        def epoch(number: int) -> dict[str, pa.RecordBatch]:
            clicks = pa.record_batch({"id": pa.array([1, number], pa.int64()), "n": pa.array([1, 1], pa.int64())})
            return {"clicks": clicks, "orders": ids(number, 100 + number)}

        for name, sink in sinks.items():
            with closing(OneSink.of(sink)) as committer:
                assert committer.check(epoch(2)[name].schema) == []
        kit = CheckpointKit(tmp_path / "checkpoint", sinks, retain_seconds=3600.0)
        kit.run(2, epoch(2))
        server.stop()
        subprocess.run(["/bin/cp", "-a", str(server.data), str(tmp_path / "older")], check=True)
        server.start()
        for number in (3, 4, 5):
            kit.run(number, epoch(number))
        queries = (
            "SELECT id, n FROM clicks ORDER BY id",
            "SELECT id FROM orders ORDER BY id",
            "SELECT epoch, row->>'id' FROM epochsink.dead_letter ORDER BY 1",
        )
        before = [rows_of(query) for query in queries]
        server.stop()
        shutil.rmtree(server.data)
        subprocess.run(["/bin/cp", "-a", str(tmp_path / "older"), str(server.data)], check=True)
        server.start()
        with pytest.raises(WentBack) as stopped:
            kit.start()
        assert "epochsink repair CHECKPOINT" in stopped.value.hint
        assert rows_of(queries[1]) == [(2,)]
        answer = repair(kit)
        assert answer.exit_code == 0, answer.output
        assert [rows_of(query) for query in queries] == before
        assert before[0][0] == (1, 4)
        kit.coordinator = kit.start()
        kit.run(6, epoch(6))
        assert rows_of(queries[1]) == [(2,), (3,), (4,), (5,), (6,)]
        kit.close()
    sys.modules.pop(MODULE, None)


class Restored:
    """A checkpoint with one sink on a service of the test's own."""

    def __init__(self, folder: Path, sink: Any, like: pa.RecordBatch, named: str) -> None:
        (folder / f"{MODULE}.py").write_text(f"{named}\n")
        with closing(OneSink.of(sink)) as committer:
            assert committer.check(like.schema) == []
        self.kit = CheckpointKit(folder / "checkpoint", {"sink": sink}, retain_seconds=3600.0)


@pytest.mark.parametrize("kind", ["indices that rows name", "a data stream"])
def test_a_table_is_repaired_beside_indices_that_lack_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str,
    postgres: PostgresService,
    elasticsearch: ElasticsearchService,
    pg_schema: str,
    pg_truth: Truth,
    fresh_index: FreshName,
) -> None:
    """Indices that lack an epoch are not repaired: then the command says what to load, and applies nothing."""
    monkeypatch.chdir(tmp_path)
    name, prefix = f"{pg_schema}.orders", fresh_index()
    pg_truth.execute(f"CREATE TABLE {name} (id bigint)")
    of_table: dict[str, Any] = {"table": name, "marker_schema": pg_schema}
    is_stream = kind == "a data stream"
    placed: dict[str, Any] = {"index": prefix} if is_stream else {"index_by": "month", "key": "id"}
    of_indices: dict[str, Any] = {**placed, "timeout": 20.0}
    if is_stream:
        with closing(vendor.Elasticsearch(elasticsearch.url)) as client:
            fields = {"id": {"type": "long"}, "@timestamp": {"type": "date"}}
            template = {"settings": {"number_of_replicas": 0}, "mappings": {"properties": fields}}
            client.indices.put_index_template(name=prefix, index_patterns=[prefix], data_stream={}, template=template)
            client.bulk(index=prefix, operations=[{"create": {}}, {"id": "no number"}])
    (tmp_path / f"{MODULE}.py").write_text(
        "from epochsink import Elasticsearch, Postgres\n"
        f"SINKS = {{'sink': Postgres({postgres.dsn!r}, **{of_table!r}),\n"
        f"         'search': Elasticsearch({elasticsearch.url!r}, **{of_indices!r})}}\n"
    )
    search = Elasticsearch(elasticsearch.url, **of_indices)
    with closing(OneSink.of(search)) as committer:
        assert committer.check(ids(1).schema.append(pa.field("@timestamp", pa.timestamp("us", "UTC")))) == []
    sinks: dict[str, Sink] = {"sink": Postgres(postgres.dsn, **of_table), "search": search}
    kit = CheckpointKit(tmp_path / "checkpoint", sinks, retain_seconds=3600.0)
    try:
        for number in range(3):
            row = {"id": number, "@timestamp": "2026-11-22T06:30:00.000000Z"}
            if is_stream:
                document = keyless([row])
            else:
                document = rendered([(str(number), row)], indices=[f"{prefix}-{number % 2}"])
            kit.run(number, {"sink": ids(number), "search": document})
        set_back(pg_truth, pg_schema, name, 0, 1, 2)
        answer = repair(kit)
        assert answer.exit_code == 0, answer.output
        assert pg_truth.rows(name) == [(0,), (1,), (2,)]
        set_back(pg_truth, pg_schema, name, 0, 1, 2)
        with closing(vendor.Elasticsearch(elasticsearch.url)) as client:
            document_id = marker_document(identity_key(kit.coordinator.identity("search")))
            client.update(index=applied_epochs.INDEX, id=document_id, doc={"epoch": 1})
        answer = repair(kit)
        assert answer.exit_code == 1
        assert "epoch 2 is in a data stream, or in indices that its rows named" in answer.output
        assert pg_truth.rows(name) == [(0,)]
    finally:
        kit.close()
        sys.modules.pop(MODULE, None)


def retry_letters(kit: CheckpointKit, client: vendor.Elasticsearch) -> int:
    """Let the index take what it refused, and return how many letters were written again."""
    client.indices.put_mapping(index="orders", properties={"late": {"type": "long"}})
    retry = ["letters", "retry", str(kit.root), "--sinks", f"{MODULE}:SINKS", "--all", "--yes", "--json"]
    answer = CliRunner().invoke(app, retry)
    assert answer.exit_code == 0, answer.output
    written: int = json.loads(answer.stdout)["written"]
    return written


def test_an_index_that_was_restored_from_a_snapshot_gets_its_epochs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "snapshots")
    with (
        LocalElasticsearch({"path.repo": folder}, short_lived=True) as node,
        closing(vendor.Elasticsearch(node.url)) as client,
    ):
        client.snapshot.create_repository(name="backup", repository={"type": "fs", "settings": {"location": folder}})
        options: dict[str, Any] = {"index": "orders", "key": "id", "create": True, "timeout": 20.0}
        options |= {"on_rejected": "dead_letter", "dead_letter_index": "letters"}
        named = f"from epochsink import Elasticsearch\nSINKS = {{'sink': Elasticsearch({node.url!r}, **{options!r})}}"
        made = Restored(tmp_path, Elasticsearch(node.url, **options), pa.record_batch({"id": pa.array(["a"])}), named)
        made.kit.run(0, {"sink": rendered([("a", {"n": 0}), ("0", {"n": 0})])})
        client.indices.put_mapping(index="orders", dynamic="strict")
        made.kit.run(1, {"sink": rendered([("a", {"n": 1}), ("1", {"n": 1}), ("late", {"late": 1})])})
        client.snapshot.create(repository="backup", snapshot="s", wait_for_completion=True)
        assert retry_letters(made.kit, client) == 1
        for number in (2, 3, 4):
            made.kit.run(number, {"sink": rendered([("a", {"n": number}), (str(number), {"n": number})])})
        every = f"orders,letters,{applied_epochs.INDEX}"
        client.indices.delete(index=every)
        client.snapshot.restore(repository="backup", snapshot="s", indices=every, wait_for_completion=True)
        with pytest.raises(WentBack):
            made.kit.start()
        answer = repair(made.kit)
        assert answer.exit_code == 0, answer.output
        assert "the index of dead letters 'letters' must come from the same snapshot" in answer.output
        # a letter that was written again since the snapshot is a letter once more
        assert retry_letters(made.kit, client) == 1
        client.indices.refresh(index="orders")
        found = {hit["_id"]: hit["_source"] for hit in client.search(index="orders", size=50)["hits"]["hits"]}
        assert found.pop("late") == {"late": 1}
        assert {name: each["n"] for name, each in found.items()} == {"a": 4, "0": 0, "1": 1, "2": 2, "3": 3, "4": 4}
        made.kit.coordinator = made.kit.start()
        made.kit.run(5, {"sink": rendered([("a", {"n": 5})])})
        made.kit.close()
    sys.modules.pop(MODULE, None)
