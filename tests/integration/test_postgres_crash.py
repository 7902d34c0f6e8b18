"""A process that is killed at any named point of a PostgreSQL epoch: the next driver brings it to the exact end."""

from __future__ import annotations

import json
import os
import random
import signal
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import Driver, ListedRows, Written, ranked
from psycopg.conninfo import conninfo_to_dict

from epochsink.postgres import Postgres
from epochsink.postgres.staging import DELETED
from epochsink.sink import Epoch, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fix_postgres import MakeDriver, Truth

PREPARED: dict[str, Any] = {"commit": "prepared", "key": "id"}
STAGED: dict[str, Any] = {"commit": "staged"}
APPEND: dict[str, Any] = {"commit": "prepared"}
BY_TASK: dict[str, Any] = {"atomic": False}
BY_TASK_UPSERT: dict[str, Any] = {"atomic": False, "key": "id"}

CASES = [
    *(
        pytest.param(mode, f"postgres.{point}", id=f"{name}-{point}")
        for name, mode in {"upsert": PREPARED, "append": APPEND}.items()
        for point in ("copied", "merged", "prepared", "committed")
    ),
    *(pytest.param(STAGED, f"postgres.{point}", id=f"staged-{point}") for point in ("copied", "merged", "committed")),
    *(
        pytest.param(BY_TASK, f"postgres.{point}", id=f"by-task-{point}")
        for point in ("copied:2", "prepared", "prepared:2", "committed", "committed:2")
    ),
    *(
        pytest.param(BY_TASK_UPSERT, f"postgres.{point}", id=f"by-task-upsert-{point}")
        for point in ("copied:2", "merged:2", "prepared:2", "committed")
    ),
]


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": [f"x{i}" for i in ids]})


FIRST, SECOND = orders(1, 2), orders(3, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only ever runs its own sessions
@pytest.mark.parametrize(("mode", "point"), CASES)
def test_a_kill_at_any_point_ends_exactly(
    mode: dict[str, Any], point: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Recorded parts are committed, all else is swept and the epoch is run again, whatever the point."""
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    driver = pg_driver(table, orders(1), **mode)
    recorded = killed_epoch(driver, point)
    assert pg_truth.count(table) in (0, 2, 4)

    later = driver.restart()
    if recorded is None:
        assert pg_truth.count(table) == 0
        later.committer.abort_orphans([])
        assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []
        later.run(0, FIRST, SECOND)
    else:
        written, parts = recorded
        later.committer.abort_orphans(parts)
        assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.COMMITTED}
        later.committer.finish(written.epoch, parts)
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in (1, 2, 3, 4)]
    assert later.committer.newest() == 0
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


def killed_epoch(
    driver: Driver, point: str, number: int = 0, tasks: Sequence[pa.RecordBatch] = (FIRST, SECOND)
) -> tuple[Written, list[dict[str, Any]]] | None:
    """Run an epoch in a child that kills itself at ``point``; return what it had recorded by then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ["EPOCHSINK_FAILPOINT"] = point
            run_epoch(Driver(driver.sink, driver.identity), writer, number, tasks)
        finally:
            os._exit(3)  # the point was not reached
    os.close(writer)
    with os.fdopen(reader) as ledger:
        record = ledger.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was never reached: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    if not record:
        return None
    entry = json.loads(record)
    kept = ListedRows({task: [batch] for task, batch in zip(entry["tasks"], tasks, strict=True)})
    return Written(Epoch(**entry["epoch"]), [], kept), entry["parts"]


def run_epoch(driver: Driver, ledger: int, number: int, tasks: Sequence[pa.RecordBatch]) -> None:
    written, parts = driver.prepare(number, *tasks)
    entry = {"epoch": asdict(written.epoch), "parts": parts, "tasks": written.rows.tasks()}
    os.write(ledger, json.dumps(entry).encode())
    driver.commit(written, parts)


Values = tuple[int | None, int | None]
State = dict[int, Values]
"""By id: n and at."""
Change = tuple[int, int | None, int | None, bool]
"""id, n, at, and whether it deletes."""


def added(state: State, changes: list[Change]) -> State:
    """Return what accumulate={"n": "sum", "at": "max"} makes of a table."""
    after = dict(state)
    for number, n, at, _ in changes:
        old = after.get(number, (None, None))
        sums, times = ([value for value in pair if value is not None] for pair in zip(old, (n, at), strict=True))
        after[number] = (sum(sums) if sums else None, max(times, default=None))
    return after


def replaced(state: State, changes: list[Change]) -> State:
    """Return what newer_wins="at" makes of a table; no two changes of a key in an epoch are of one time."""
    after = dict(state)
    for number in {change[0] for change in changes}:
        _, n, at, gone = max((change for change in changes if change[0] == number), key=lambda change: age(change[2]))
        if number not in after or age(at) >= age(after[number][1]):
            after.pop(number, None)
            if not gone:
                after[number] = (n, at)
    return after


def folded(state: State, changes: list[Change]) -> State:
    """Return what `FOLDED` makes of a table: an epoch's rows are folded first, in the order of their times."""
    epoch: State = {}
    for number, n, at, _ in sorted(changes, key=lambda change: age(change[2])):
        epoch[number] = folded_into(epoch.get(number), (n, at))
    return state | {number: folded_into(state.get(number), new) for number, new in epoch.items()}


def folded_into(old: Values | None, new: Values) -> Values:
    return new if old is None else ((old[0] or 0) * 3 + (new[0] or 0), max(old[1], new[1], key=age))


def age(at: int | None) -> int:
    return -1 if at is None else at


EPOCHS = 5
GONE = 0.3
"""The share of changes that delete."""

COUNTERS: dict[str, Any] = {"key": "id", "accumulate": {"n": "sum", "at": "max"}}
FOLDED: dict[str, Any] = {
    "key": "id",
    "order_by": "at",
    "accumulate": {"n": "coalesce(stored, 0) * 3 + coalesce(new, 0)", "at": "max"},
}
NEWEST: dict[str, Any] = {"key": "id", "newer_wins": "at", "skip_unchanged": True, "delete_when": "gone"}
POINTS = {
    "prepared": ("copied", "merged", "prepared", "committed"),
    "staged": ("copied", "merged", "committed"),
    "by-task": ("copied:2", "merged:2", "prepared:2", "committed"),
}
WAYS: dict[str, dict[str, Any]] = {
    "prepared": {"commit": "prepared", "spool": True},
    "staged": {"commit": "staged", "spool": True},
    "by-task": {"atomic": False, "spool": True},
}


def changes_of(rng: random.Random) -> list[Change]:
    numbers = [0, 1, *(rng.randrange(4) for _ in range(6))]
    times = rng.sample([None, *range(12)], len(numbers))
    return [
        (number, rng.choice([None, 1, 10]), at, rng.random() < GONE) for number, at in zip(numbers, times, strict=True)
    ]


def task_of(changes: list[Change], *, deletes: bool = False, ordered: bool = False) -> pa.RecordBatch:
    columns = zip(("id", "n", "at", DELETED), zip(*changes, strict=True), strict=True)
    made = {name: pa.array(values, pa.bool_() if name == DELETED else pa.int64()) for name, values in columns}
    batch = pa.record_batch(made if deletes else {name: made[name] for name in ("id", "n", "at")})
    return ranked(batch, batch.column("at")) if ordered else batch


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "apply"),
    [(COUNTERS, added), (FOLDED, folded), (NEWEST, replaced)],
    ids=["counters", "expressions", "newest"],
)
def test_what_is_compared_with_stored_rows_survives_kills_at_random_points(
    options: dict[str, Any],
    apply: Callable[[State, list[Change]], State],
    way: str,
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    """Nothing is lost, added twice or visible early, also if an epoch is lost and prepared again from the spool."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    table = f"{pg_schema}.counters"
    like = {"deletes": "delete_when" in options, "ordered": "order_by" in options}
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, n bigint, at bigint)")
    driver = pg_driver(table, task_of([(0, 0, 0, False)], **like), **options, **WAYS[way])
    state: State = {}
    for number in range(EPOCHS):
        changes = changes_of(rng)
        # tasks share no key, as Spark spreads the rows with atomic=False
        halves = [[change for change in changes if change[0] % 2 == half] for half in (0, 1)]
        tasks = [task_of(half, **like) for half in halves]
        recorded = killed_epoch(driver, f"postgres.{rng.choice(POINTS[way])}", number, tasks)
        before, state = state, apply(state, changes)
        driver = driver.restart()
        if recorded is None:
            assert stored(pg_truth, table) == before, (seed, number)
            driver.committer.abort_orphans([])
            driver.run(number, *tasks)
        else:
            commit_again(driver, *recorded, pg_schema, pg_truth, lose=rng.random() < 0.5)
        assert stored(pg_truth, table) == state, (seed, number)
        assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", ["prepared", "staged"])
def test_dead_letters_survive_kills_at_random_points(
    way: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Each row is once in the table or once among the letters, visible with its epoch, whatever dies in between."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    table, refused = f"{pg_schema}.taken", 10
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, n bigint CHECK (n <> {refused}), at bigint)")
    like = task_of([(0, 0, 0, False)], deletes=False)
    driver = pg_driver(table, like, **WAYS[way], on_rejected="dead_letter")
    taken: list[tuple[int, int | None, int | None]] = []
    letters: list[tuple[int, int]] = []
    for number in range(EPOCHS):
        changes = changes_of(rng)
        tasks = [task_of(half, deletes=False) for half in (changes[:4], changes[4:])]
        recorded = killed_epoch(driver, f"postgres.{rng.choice(POINTS[way])}", number, tasks)
        driver = driver.restart()
        if recorded is None:
            assert in_both(pg_truth, table, pg_schema) == (sorted(taken, key=repr), sorted(letters)), (seed, number)
            driver.committer.abort_orphans([])
            driver.run(number, *tasks)
        else:
            commit_again(driver, *recorded, pg_schema, pg_truth, lose=rng.random() < 0.5)
        taken += [change[:3] for change in changes if change[1] != refused]
        letters += [(number, change[0]) for change in changes if change[1] == refused]
        assert in_both(pg_truth, table, pg_schema) == (sorted(taken, key=repr), sorted(letters)), (seed, number)
        assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


def in_both(truth: Truth, table: str, schema: str) -> tuple[list[tuple[Any, ...]], list[tuple[int, int]]]:
    """Return the rows of the table, and epoch and id of each letter."""
    found = truth.execute(f"SELECT epoch, (\"row\"->>'id')::bigint FROM {schema}.dead_letter")  # noqa: S608
    return truth.rows(table), sorted((int(epoch), int(number)) for epoch, number in found)


def stored(truth: Truth, table: str) -> State:
    return {number: (n, at) for number, n, at in truth.rows(table)}


def commit_again(
    driver: Driver, written: Written, parts: list[dict[str, Any]], schema: str, truth: Truth, *, lose: bool
) -> None:
    """Commit what is recorded, twice; ``lose``: after an administrator has cleared it away."""
    driver.committer.abort_orphans(parts)
    if lose:
        for gid in truth.prepared():
            truth.execute(f"ROLLBACK PREPARED '{gid}'")
        for name in truth.staging(schema):
            truth.execute(f"DROP TABLE {schema}.{name}")
    verdicts = driver.commit(written, parts)
    for place, verdict in enumerate(verdicts):
        if verdict.outcome is Outcome.ABORTED:
            assert lose
            parts[place] = driver.committer.replay(written.epoch, parts[place], written.rows, uuid.uuid4().hex)
    for _ in range(2):
        assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
    driver.committer.finish(written.epoch, parts)


def test_every_committable_is_json_without_secrets(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """It goes into the ledger, which anybody who reads the checkpoint can read."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint PRIMARY KEY, note text)")
    for mode in (PREPARED, STAGED, BY_TASK, BY_TASK_UPSERT):
        driver = pg_driver(f"{pg_schema}.t", orders(1), **mode)
        written, parts = driver.prepare(0, orders(1))
        for committable in (*written.committables, *parts):
            text = json.dumps(committable)
            assert json.loads(text) == committable
            assert str(conninfo_to_dict(pg_truth.dsn)["password"]) not in text
        assert isinstance(driver.sink, Postgres)
        driver.committer.abort_orphans([])
