"""Several sinks of one query on one database: one transaction an epoch, whatever dies, is lost or is changed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
import pytest
from family_tables import QUERY, FamilyTables

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.resolve import Resolution, Ruling
from epochsink.errors import ConfigurationError, RowsRejected, WentBack
from epochsink.failpoints import POINTS
from epochsink.postgres import Postgres
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Ballot, Epoch, LastDone
from epochsink.testing.sink_rig import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from family_tables import Rows
    from fix_postgres import Truth


TYPES = {"parents": {"id": "int64", "note": "string"}, "children": {"id": "int64", "parent": "int64"}}
WAYS = ["prepared", "staged"]


def epoch(number: int, note: str = "x") -> dict[str, Rows]:
    """Return rows of one epoch: three parents, and two children of each."""
    ids = range(3 * number, 3 * number + 3)
    return {
        "parents": [{"id": one, "note": f"{note}{one}"} for one in ids],
        "children": [{"id": 2 * one + twin, "parent": one} for one in ids for twin in (0, 1)],
    }


@pytest.fixture
def family(tmp_path: Path, pg_schema: str, pg_truth: Truth) -> Iterator[FamilyTables]:
    """Make two tables with a foreign key, which is not deferrable; the children's has no key that hides a duplicate."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.parents (id bigint PRIMARY KEY, note text)")
    pg_truth.execute(
        f"CREATE TABLE {pg_schema}.children (id bigint, parent bigint NOT NULL REFERENCES {pg_schema}.parents)"
    )
    common = {"dsn": pg_truth.dsn, "marker_schema": pg_schema}
    sinks: dict[str, dict[str, Any]] = {
        "parents": {"table": f"{pg_schema}.parents", "key": "id", **common},
        "children": {"table": f"{pg_schema}.children", **common},
    }
    made = FamilyTables(str(tmp_path / "checkpoint"), sinks, {name: dict(kinds) for name, kinds in TYPES.items()})
    yield made
    made.close()


def use(family: FamilyTables, **options: Any) -> None:
    for sink in family.sinks.values():
        sink.update(options)


def rows(family: FamilyTables, truth: Truth) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    return truth.rows(family.sinks["parents"]["table"]), truth.rows(family.sinks["children"]["table"])


def expected(*epochs: dict[str, Rows]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    found = [[tuple(row.values()) for one in epochs for row in one.get(name, [])] for name in TYPES]
    return sorted(found[0], key=repr), sorted(found[1], key=repr)


class Reader(threading.Thread):
    """Counts both tables in one snapshot, as often as it can."""

    def __init__(self, family: FamilyTables, dsn: str) -> None:
        super().__init__(daemon=True)
        self._query = (
            f"SELECT (SELECT count(*) FROM {family.sinks['parents']['table']}), "  # noqa: S608 - our own names
            f"(SELECT count(*) FROM {family.sinks['children']['table']})"
        )
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._ended = threading.Event()
        self.seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        while not self._ended.is_set():
            parents, children = self._connection.execute(self._query.encode()).fetchone() or (0, 0)
            self.seen.add((parents, children))

    def stop(self) -> set[tuple[int, int]]:
        self._ended.set()
        self.join()
        self._connection.close()
        return self.seen


@pytest.mark.parametrize("commit", WAYS)
def test_no_reader_sees_a_child_without_its_parent_or_a_table_ahead_of_the_other(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    use(family, commit=commit)
    driver = family.driver()
    reader = Reader(family, pg_truth.dsn)
    reader.start()
    try:
        for number in range(12):
            family.prepare(driver, number, epoch(number))
            assert len(pg_truth.prepared()) == (commit == "prepared")
            family.decide(number)
            assert driver.commit_decided()
    finally:
        seen = reader.stop()
    assert {children - 2 * parents for parents, children in seen} == {0}, seen
    assert len(seen) > 2, "the reader was not looking"
    assert rows(family, pg_truth) == expected(*map(epoch, range(12)))
    assert pg_truth.prepared() == pg_truth.staging(family.sinks["parents"]["marker_schema"]) == []


def test_the_driver_holds_two_sessions_for_the_group_and_one_for_each_sink(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """The sessions that bear a sink's name tell an operator that its driver is connected."""
    driver = family.driver()
    family.run(driver, 0, epoch(0))
    (part,) = family.ledger()[0]["parents"]
    keys = [part["members"][name]["key"] for name in TYPES]
    assert [pg_truth.sessions(key) for key in keys] == [3, 1]


def test_one_table_set_back_between_the_comparison_and_the_merge_of_all_takes_no_rows(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """The transaction that merges compares the markers of each sink, whichever is committed first."""
    use(family, commit="staged")
    driver = family.driver()
    family.run(driver, 0, epoch(0))
    family.prepare(driver, 1, epoch(1))
    first, second = family.ledger()
    (part,) = second["parents"]
    markers, key = family.sinks["children"]["marker_schema"], part["members"]["children"]["key"]
    pg_truth.execute(f"DELETE FROM {markers}.marker WHERE key = %s AND epoch = 0", key)  # noqa: S608 - our own names
    ballots = {
        name: Ballot(second[name], NO_ROWS, LastDone(0, first[name][0]["attempt"], tuple(first[name])))
        for name in TYPES
    }
    (participant,) = family.participants
    with pytest.raises(WentBack, match=r"children.* has no marker of this query"):
        participant.commit(Epoch(1, part["attempt"]), ballots)
    assert rows(family, pg_truth) == expected(epoch(0))


BEFORE_THE_RECORD = (
    "coordinator.take.before",
    "coordinator.take.after",
    "coordinator.recover.after",
    "coordinator.settle.before",
    "postgres.copied:2",
    "coordinator.vote.before",
    "postgres.merged",
    "postgres.prepared",
    "coordinator.vote.between",
    "coordinator.vote.between:2",
    "coordinator.record.before",
)
AFTER_THE_RECORD = (
    "coordinator.record.after",
    "coordinator.commit.before",
    "coordinator.commit.compared",
    "postgres.committed",
    "coordinator.commit.between",
    "coordinator.commit.between:2",
    "coordinator.done.before",
    "coordinator.done.after",
    "coordinator.drain.before",
)
REPLAYS = ("before", "prepared", "after")
KILLS = {"prepared": (*BEFORE_THE_RECORD, *AFTER_THE_RECORD), "staged": ("postgres.merged", *AFTER_THE_RECORD)}


def test_every_point_of_the_driver_that_needs_no_spark_is_among_these() -> None:
    # an operator's retry of dead letters dies at its own in test_postgres_retry.py
    mine = {
        point
        for point in POINTS
        if point.partition(".")[0] in ("coordinator", "postgres") and not point.startswith("postgres.letters.")
    }
    tried = {point.partition(":")[0] for point in (*BEFORE_THE_RECORD, *AFTER_THE_RECORD)}
    # Spark's write job lies behind this one
    assert tried | {f"coordinator.replay.{step}" for step in REPLAYS} == mine - {"coordinator.write.before"}


@pytest.mark.parametrize("commit", WAYS)
def test_killed_at_any_point_both_tables_are_exact(commit: str, family: FamilyTables, pg_truth: Truth) -> None:
    """One query lives through all kills; each life goes on with a new epoch after what the one before left."""
    use(family, commit=commit)
    epochs: list[dict[str, Rows]] = []
    for point in KILLS[commit]:
        epochs.append(epoch(len(epochs)))
        assert family.killed_at(point, epochs), point
        parents, children = rows(family, pg_truth)
        assert len(children) == 2 * len(parents), point
    family.play(epochs)
    assert rows(family, pg_truth) == expected(*epochs)
    assert pg_truth.prepared() == pg_truth.staging(family.sinks["parents"]["marker_schema"]) == []


def lose(family: FamilyTables, truth: Truth) -> None:
    """Roll back what is prepared, or drop the staging tables, as an administrator might."""
    schema = family.sinks["parents"]["marker_schema"]
    for gid in truth.prepared():
        truth.execute(f"ROLLBACK PREPARED '{gid}'")
    for table in truth.staging(schema):
        truth.execute(f"DROP TABLE {schema}.{table}")


@pytest.mark.parametrize("commit", WAYS)
def test_what_is_lost_is_prepared_again_for_both_tables_at_once(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    """Also if the driver dies on the way: one entry of the ledger puts the new part wherever the old one stood."""
    use(family, commit=commit)
    epochs = [epoch(0), epoch(1)]
    assert family.killed_at("coordinator.commit.before:2", epochs)
    lose(family, pg_truth)
    for point in REPLAYS:
        assert family.killed_at(f"coordinator.replay.{point}", epochs), point
        assert rows(family, pg_truth) == expected(epoch(0))
    ((_, parents), (_, children)) = family.ledger()[1].items()
    assert parents == children != ()
    family.play(epochs)
    assert rows(family, pg_truth) == expected(*epochs)
    assert pg_truth.prepared() == pg_truth.staging(family.sinks["parents"]["marker_schema"]) == []


@pytest.mark.parametrize("commit", WAYS)
def test_rows_are_written_in_the_order_of_the_sinks_and_deleted_in_the_reverse(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    """A child goes with its parent, another moves to a new one; the constraint is checked after each statement."""
    pg_truth.execute(f"ALTER TABLE {family.sinks['children']['table']} ADD PRIMARY KEY (id)")
    use(family, commit=commit, delete_when="gone")
    family.sinks["children"]["key"] = "id"
    driver = family.driver()

    def changes(parents: dict[int, bool], children: dict[int, tuple[int, bool]]) -> dict[str, Rows]:
        return {
            "parents": [{"id": one, "note": "x", "epochsink_delete": gone} for one, gone in parents.items()],
            "children": [
                {"id": one, "parent": parent, "epochsink_delete": gone} for one, (parent, gone) in children.items()
            ],
        }

    family.run(driver, 0, changes({1: False, 2: False}, {10: (1, False), 11: (1, False), 12: (2, False)}))
    family.run(driver, 1, changes({1: True, 3: False}, {10: (1, True), 11: (3, False), 13: (3, False)}))
    assert rows(family, pg_truth) == ([(2, "x"), (3, "x")], [(11, 3), (12, 2), (13, 3)])


@pytest.mark.parametrize("commit", WAYS)
def test_two_sinks_may_write_the_same_rows_of_one_table(commit: str, family: FamilyTables, pg_truth: Truth) -> None:
    family.sinks["late"] = dict(family.sinks["parents"])
    family.types["late"] = family.types["parents"]
    use(family, commit=commit)
    driver = family.driver()
    for number in (0, 1):
        one = epoch(number)
        family.run(driver, number, {**one, "late": epoch(number, "late")["parents"][:2]})
    notes = [note for _, note in rows(family, pg_truth)[0]]
    assert notes == ["late0", "late1", "x2", "late3", "late4", "x5"]


def test_sinks_with_rows_in_different_epochs_and_new_ones_take_part(family: FamilyTables, pg_truth: Truth) -> None:
    """What routing (``where=``) gives none to has no share; a sink that joins finds the others' epoch pending."""
    children = family.sinks.pop("children")
    driver = family.driver()
    family.prepare(driver, 0, {"parents": epoch(0)["parents"]})
    family.sinks["children"] = children
    later = family.driver()
    family.decide(0)
    assert later.commit_decided()
    family.run(later, 1, {"children": epoch(0)["children"]})
    family.run(later, 2, epoch(2))
    family.run(later, 3, {})
    shares = [set(one) for one in family.ledger()]
    assert shares == [{"parents"}, {"children"}, {"parents", "children"}, set()]
    assert rows(family, pg_truth) == expected(epoch(0), epoch(2))


def test_an_epoch_with_a_transaction_for_each_sink_is_committed_as_it_was_recorded(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """As an older version prepared it, or other options did; each part is prepared again on its own."""
    family.run(family.driver(), 0, {"parents": epoch(1)["parents"]})
    family.sinks["parents"]["dsn"] = pg_truth.dsn.replace("127.0.0.1", "localhost")
    apart = family.driver()
    family.prepare(apart, 1, {"parents": epoch(0)["parents"], "children": epoch(1)["children"]})
    assert len(pg_truth.prepared()) == 2
    family.sinks["parents"]["dsn"] = pg_truth.dsn
    later = family.driver()
    lose(family, pg_truth)
    family.decide(1)
    assert later.commit_decided()
    assert rows(family, pg_truth) == (expected(epoch(0), epoch(1))[0], expected(epoch(1))[1])


def test_what_a_group_that_later_starts_set_apart_has_lost_is_prepared_again_for_each(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """The marker of the one that was prepared again first does not speak for the other."""
    family.run(family.driver(), 0, {"parents": epoch(1)["parents"]})
    family.prepare(family.driver(), 1, {"parents": epoch(0)["parents"], "children": epoch(1)["children"]})
    lose(family, pg_truth)
    family.decide(1)
    family.sinks["parents"]["dsn"] = pg_truth.dsn.replace("127.0.0.1", "localhost")
    family.driver()
    assert rows(family, pg_truth) == (expected(epoch(0), epoch(1))[0], expected(epoch(1))[1])
    assert pg_truth.prepared() == []


def test_what_one_sink_has_prepared_again_leaves_the_transaction_of_a_sink_that_commits_apart(
    family: FamilyTables, pg_truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are of one attempt, whose staging table is a leftover for the first sink by then."""
    family.run(family.driver(), 0, {"parents": epoch(1)["parents"]})
    family.sinks["parents"]["dsn"] = pg_truth.dsn.replace("127.0.0.1", "localhost")
    family.prepare(family.driver(), 1, {"parents": epoch(0)["parents"], "children": epoch(1)["children"]})
    family.decide(1)
    ((parents,), (children,)) = (family.ledger()[1][name] for name in TYPES)
    pg_truth.execute(f"ROLLBACK PREPARED '{parents['gid']}'")
    assert family.killed_at("coordinator.replay.after", [])
    assert children["gid"] in pg_truth.prepared()
    caplog.set_level(logging.INFO, "epochsink")
    family.driver()
    assert "rolled back prepared transaction" not in caplog.text
    assert rows(family, pg_truth) == (expected(epoch(0), epoch(1))[0], expected(epoch(1))[1])


@pytest.mark.parametrize("commit", WAYS)
def test_leftovers_of_the_group_are_ended_whatever_the_order_of_the_sinks(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    use(family, commit=commit)
    assert family.killed_at("coordinator.record.before", [epoch(0)])
    assert len(pg_truth.prepared()) == (commit == "prepared")
    family.sinks = dict(reversed(family.sinks.items()))
    family.driver()
    assert pg_truth.prepared() == []
    family.sinks = dict(reversed(family.sinks.items()))
    driver = family.driver()
    assert pg_truth.staging(family.sinks["parents"]["marker_schema"]) == []
    family.run(driver, 0, epoch(0))
    assert rows(family, pg_truth) == expected(epoch(0))


def test_a_leftover_of_the_group_is_ended_though_the_sink_whose_name_it_bears_has_left_the_query(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """A shared transaction bears the name of the first sink, and holds locks on the tables of both."""
    use(family, commit="prepared")
    assert family.killed_at("coordinator.record.before", [epoch(0)])
    assert len(pg_truth.prepared()) == 1
    table = family.sinks.pop("parents")["table"]
    driver = family.driver()
    assert pg_truth.prepared() == []
    pg_truth.execute(f"INSERT INTO {table} SELECT generate_series(0, 2)")
    family.run(driver, 0, {"children": epoch(0)["children"]})
    assert pg_truth.rows(family.sinks["children"]["table"]) == expected(epoch(0))[1]


@pytest.mark.parametrize("commit", WAYS)
def test_rows_that_a_table_refuses_are_set_aside_by_the_sinks_that_say_so(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    """A refused parent's children are refused too; all others of both tables become visible together."""
    use(family, commit=commit, on_rejected="dead_letter")
    table, schema = family.sinks["parents"]["table"], family.sinks["parents"]["marker_schema"]
    pg_truth.execute(f"ALTER TABLE {table} ADD CHECK (note <> 'x1')")
    driver = family.driver()
    family.run(driver, 0, epoch(0))
    good = {"parents": [row for row in epoch(0)["parents"] if row["id"] != 1]}
    good["children"] = [row for row in epoch(0)["children"] if row["parent"] != 1]
    assert rows(family, pg_truth) == expected(good)
    found = pg_truth.execute(f"SELECT sink, count(*) FROM {schema}.dead_letter GROUP BY sink ORDER BY sink")  # noqa: S608
    assert found == [("children", 2), ("parents", 1)]


def test_a_row_that_one_table_refuses_keeps_the_epoch_out_of_both(family: FamilyTables, pg_truth: Truth) -> None:
    """In time, where the epoch is merged after the decision, with validate=True."""
    bad = {**epoch(0), "children": [{"id": 1, "parent": 99}]}
    for options in ({"commit": "prepared"}, {"commit": "staged", "validate": True}):
        use(family, **options)
        driver = family.driver()
        with pytest.raises(RowsRejected, match=r"children_parent_fkey[\s\S]*same dsn="):
            family.prepare(driver, 0, bad)
        assert pg_truth.prepared() == []
    driver = family.driver()
    family.run(driver, 0, epoch(0))
    assert rows(family, pg_truth) == expected(epoch(0))


@pytest.mark.parametrize("commit", WAYS)
def test_a_failover_that_lost_the_commit_is_repaired_whichever_sink_is_asked_first(
    commit: str, family: FamilyTables, pg_truth: Truth
) -> None:
    """The ledger calls the epoch done, and the server has the transaction prepared again, or its markers no more."""
    use(family, commit=commit)
    driver = family.driver()
    family.run(driver, 0, epoch(0))
    family.prepare(driver, 1, epoch(1))
    family.decide(1)
    # by the ledger alone: so it looks on a standby that has PREPARE TRANSACTION, and lacks what came after
    family.say_done(1)
    family.sinks = dict(reversed(family.sinks.items()))
    if commit == "staged":
        with pytest.raises(WentBack, match="older copy"):
            family.driver()
        return
    assert family.driver().queue.pending == ()
    assert rows(family, pg_truth) == expected(epoch(0), epoch(1))


def test_only_sinks_that_the_server_would_let_share_are_of_one_group() -> None:
    def group(dsn: str = "host=127.0.0.1 dbname=a user=u", **options: Any) -> object:
        return Postgres(dsn, table="t", **options).commits_with

    assert group() == group("postgresql://u@127.0.0.1/a", options={"password": "p"}, commit="prepared", timeout=5)
    assert group() is not None
    assert group(atomic=False) is None
    others = ["host=127.0.0.2 dbname=a user=u", "host=127.0.0.1 dbname=b user=u", "host=127.0.0.1 dbname=a user=v"]
    settings = group(options={"options": "-c search_path=other"})
    assert group() not in [*(group(dsn, allow_insecure=True) for dsn in others), group(commit="staged"), settings]


def test_sinks_whose_sessions_have_settings_of_their_own_share_no_transaction(
    family: FamilyTables, pg_truth: Truth
) -> None:
    """Triggers, defaults and policies of a table may ask for them: in another's session its rows would be wrong."""
    for name, sink in family.sinks.items():
        pg_truth.execute(f"DROP TABLE {sink['table']} CASCADE")
        pg_truth.execute(f"CREATE TABLE {sink['table']} (id bigint, tenant text DEFAULT current_setting('app.tenant'))")
        sink.pop("key", None)
        sink["options"] = {"options": f"-c app.tenant={name}"}
        family.types[name] = {"id": "int64"}
    family.run(family.driver(), 0, {name: [{"id": 1}] for name in family.sinks})
    assert rows(family, pg_truth) == ([(1, "parents")], [(1, "children")])


def test_an_operator_closes_a_shared_epoch_for_all_of_its_sinks(
    family: FamilyTables, pg_truth: Truth, tmp_path: Path
) -> None:
    """What was discarded for one would come back with the other's commit."""
    driver = family.driver()
    family.prepare(driver, 0, epoch(0))
    place = QueryCheckpoint(LocalStorage(Path(family.folder)), family.folder, family.spool, QUERY)
    folder = tmp_path / "kept"
    folder.mkdir()
    family.decide(0)
    with pytest.raises(ConfigurationError, match="one transaction for 'children', 'parents'"):
        Resolution(place, epoch=0, sink="children", ruling=Ruling.REPLAY, sinks=family.made, folder=folder)
    resolution = Resolution(place, epoch=0, sink="children", ruling=Ruling.DISCARD, sinks={}, folder=folder)
    assert sum("spooled rows" in line for line in resolution.plan()) == 2
    resolution.carry_out()
    assert {path.name: len(pq.read_table(path)) for path in folder.iterdir()} == {
        "epoch-0-children.parquet": 6,
        "epoch-0-parents.parquet": 3,
    }
    family.driver()
    assert rows(family, pg_truth) == ([], [])
    assert pg_truth.prepared() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_shared_epoch_whose_target_is_asked_for_one_sink_is_committed_for_all(
    family: FamilyTables, pg_truth: Truth, tmp_path: Path, way: str
) -> None:
    """They share a transaction, so the question is about both."""
    use(family, commit=way)
    driver = family.driver()
    family.prepare(driver, 0, epoch(0))
    family.decide(0)
    place = QueryCheckpoint(LocalStorage(Path(family.folder)), family.folder, family.spool, QUERY)
    answer = Resolution(place, epoch=0, sink="children", ruling=Ruling.COMMITTED, sinks=family.made, folder=tmp_path)
    answer.carry_out()
    assert rows(family, pg_truth) == expected(epoch(0))
    assert pg_truth.prepared() == []
    family.run(family.driver(), 1, epoch(1))
    assert rows(family, pg_truth) == expected(epoch(0), epoch(1))
