"""A checkpoint that is copied, cut or set back: exact, or a stop that says why, and whose way on ends well when typed.

One Spark session, and one query into Kafka, PostgreSQL and Elasticsearch for each case.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from three_targets import Servers, ThreeTargets

from epochsink.errors import SpoolDamaged, SpoolMissing, WentBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_services import FreshName
    from pyspark.sql import SparkSession

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

    Change = Callable[[Path], object]


@pytest.fixture
def servers(kafka: KafkaService, postgres: PostgresService, elasticsearch: ElasticsearchService) -> Servers:
    return Servers(kafka, postgres, elasticsearch)


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path, servers: Servers, fresh_index: FreshName) -> Iterator[ThreeTargets]:
    made = ThreeTargets(spark, tmp_path / "query", servers, fresh_index("goes_back"))
    yield made
    made.end()


def test_join_running_left_in_the_code_begins_no_ledger_where_one_was_lost(query: ThreeTargets, tmp_path: Path) -> None:
    query.put((0, 1))
    query.goes_on(join_running=True)
    kept = shutil.move(query.checkpoint / "epochsink", tmp_path)
    query.put((2, 3))
    lost = query.stops(join_running=True)
    assert isinstance(lost, WentBack)
    assert "the folder epochsink/ of this checkpoint is lost" in lost.message
    assert "take join_running=True out of the code, and restore epochsink/" in lost.hint
    query.holds(0)
    shutil.rmtree(query.checkpoint / "epochsink", ignore_errors=True)
    shutil.copytree(kept, query.checkpoint / "epochsink")
    query.goes_on()
    query.holds(0, 1)


def test_a_copy_of_a_checkpoint_that_has_fallen_behind_stops(query: ThreeTargets, tmp_path: Path) -> None:
    query.epochs(0)
    copy = query.copy(tmp_path / "copy")
    query.epochs(1)
    behind = copy.stops()
    assert isinstance(behind, WentBack)
    assert "the checkpoint is the older copy, or a driver on another copy of it is running" in behind.message
    query.epochs(2)
    query.holds(0, 1, 2)


def test_of_two_copies_that_prepare_one_epoch_each_only_one_commits_it(query: ThreeTargets, tmp_path: Path) -> None:
    query.epochs(0)
    copy = query.copy(tmp_path / "copy")
    query.dies_prepared(1)
    copy.goes_on()
    other = query.stops()
    assert isinstance(other, WentBack)
    assert "a driver on another copy of this checkpoint writes for the same query" in other.message
    copy.goes_on()
    query.holds(0, 1)


def test_a_decision_that_is_deleted_is_made_again_without_its_rows(query: ThreeTargets) -> None:
    query.epochs(0, 1)
    query.forget_commit(1)
    query.epochs(2)
    query.holds(0, 1, 2)
    query.forget_commit(2)
    query.forget_offsets(2)
    query.epochs(3)
    query.holds(0, 1, 2, 3)


def test_a_ledger_that_lacks_its_newest_entries_is_complete_or_refused(query: ThreeTargets, tmp_path: Path) -> None:
    query.epochs(0, 1)
    ledger = query.checkpoint / "epochsink" / "ledger"
    kept = shutil.copytree(ledger, tmp_path / "kept")
    for entries in (4, 2):
        for path in sorted(ledger.glob("[0-9]*"))[-entries:]:
            path.unlink()
        refused = query.stops()
        assert isinstance(refused, WentBack)
        assert "the ledger is the older copy" in refused.message
        assert "restore the checkpoint folder and its epochsink/ folder from the same copy" in refused.hint
        shutil.rmtree(ledger)
        shutil.copytree(kept, ledger)
    max(ledger.glob("[0-9]*")).unlink()
    query.epochs(2)
    query.holds(0, 1, 2)


def change(path: Path) -> None:
    """Change one letter of a row."""
    data = path.read_bytes()
    assert b"word" in data
    path.write_bytes(data.replace(b"word", b"wort"))


def cut(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def test_a_spool_that_is_harmed_while_an_epoch_is_pending_is_named_and_not_applied(
    query: ThreeTargets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Elasticsearch needs the spool here: the others hold their rows prepared."""
    query.epochs(0)
    query.dies_prepared(1)
    spool = query.checkpoint / "epochsink" / "spool"
    kept = shutil.copytree(spool, tmp_path / "kept")
    harms: dict[Change, type[SpoolMissing]] = {change: SpoolDamaged, cut: SpoolDamaged, remove: SpoolMissing}
    for harm, error in harms.items():
        shutil.copytree(kept, spool, dirs_exist_ok=True)
        files = list(spool.rglob("*.arrow"))
        assert len(files) == 2, "the topic keeps its rows by itself"
        for path in files:
            harm(path)
        refused = query.stops()
        assert type(refused) is error
        query.holds(0, 1, search=[0])
    monkeypatch.chdir(tmp_path)
    query.follow(refused, "--without-rows")
    query.epochs(2)
    query.holds(0, 1, 2, search=[0, 2])
