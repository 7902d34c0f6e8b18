"""The page's state table is what the specification says, and what the production engine does."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from query_by_hand import Query

from epochsink.errors import WentBack
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger_entries import Entry
from epochsink.sink import Committable, RowCount, Task
from model.state_table import LAST, ROWS, Held, Outcome, outcome, table

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "protocol.md"
OLDER: Final = {
    "ledger": r"the ledger knows only those up to 1|epoch 2 was decided without ExactlyOnce",
    "checkpoint": r"already holds epoch 2 of this query, and the ledger knows only epochs up to 1",
    "target": r"the ledger says that epoch 2 is done: the target is the older copy",
}
"""What the error says if one of the three is the older copy."""


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy all folders as epoch N is planned, prepared, recorded, visible and done, by the production engine."""
    folder = tmp_path_factory.mktemp("moments")
    query = Query(folder / "now")

    def keep(moment: str) -> None:
        shutil.copytree(folder / "now", folder / moment)

    driver = query.driver()
    for number in range(LAST):
        query.plan(number)
        assert driver.settle(number) is Plan.WRITE
        prepare(query, driver, number)
        query.decide(number)
        assert driver.commit_decided()
    query.plan(LAST)
    keep("planned")
    append = driver._run.ledger.append

    def kept_before(entry: Entry) -> None:
        keep(moment_of(entry))
        append(entry)

    driver._run.ledger.append = kept_before  # type: ignore[method-assign]
    assert driver.settle(LAST) is Plan.WRITE
    prepare(query, driver, LAST)
    keep("recorded")
    query.decide(LAST)
    assert driver.commit_decided()
    keep("done")
    return folder


def prepare(query: Query, driver: Coordinator, number: int) -> None:
    """Write an epoch of one row by one task, which keeps the row too, and record it."""
    epoch = driver.begin(number)
    task = Task(driver.identity("out"), epoch, 0, uuid.uuid4().hex)
    batch = pa.RecordBatch.from_pydict({"id": [number]})
    writer, spool = query.sink.writer(task), query.spool.writer(task, batch.schema)
    writer.write(batch)
    spool.write(batch)
    accepted = (task.uuid, writer.prepare())
    driver.record(epoch, {"out": [accepted]}, {"out": {task.uuid: spool.close()}}, {"out": RowCount(1, 0, 8)})


def moment_of(entry: Entry) -> str:
    """Return what the target holds as this entry is about to be appended."""
    return {"Prepared": "prepared", "Done": "visible"}[type(entry).__name__]


def composed(held: Held, moments: Path, folder: Path) -> Query:
    """Return a query that has each part as it was at another moment."""
    ledger = {"nothing": "planned"}.get(held.ledger, held.ledger)
    target = {"nothing": "planned"}.get(held.target, held.target)
    rows = (
        "recorded" if held.ledger == "recorded" or (held.target == "prepared" and held.ledger == "nothing") else "done"
    )
    for part, moment in (
        ("checkpoint/offsets", "planned"),
        ("checkpoint/commits", "done" if held.commits == "yes" else "planned"),
        ("checkpoint/epochsink/ledger", ledger),
        ("checkpoint/epochsink/spool", rows),
        ("sink", target),
    ):
        shutil.copytree(moments / moment / part, folder / part, dirs_exist_ok=True)
    return Query(folder)


def parts_of(query: Query) -> Sequence[Committable]:
    """Return what the ledger names of epoch N; nothing once it is done and summed up."""
    prepared = query.history().epochs.get(LAST)
    return [*prepared.shares["out"].parts] if prepared and prepared.shares else []


def played(query: Query, commits: str) -> Outcome:
    """Start the production coordinator, let it run epoch N if Spark would, and see what it did."""
    leftovers = set(query.sink.prepared())
    recorded, parts = LAST in query.history().epochs, parts_of(query)
    before = query.visible().count(LAST)
    plan, older = None, ""
    try:
        driver = query.driver()
        if commits == "no":
            plan = driver.settle(LAST)
            if plan is Plan.WRITE:
                prepare(query, driver, LAST)
            query.decide(LAST)
            assert driver.commit_decided()
        driver.drain()
    except WentBack as stop:
        older = next((who for who, text in OLDER.items() if re.search(text, str(stop))), str(stop))
    return Outcome(
        ends_leftover=bool(leftovers) and not recorded and not older,
        writes=plan is Plan.WRITE,
        adopts=plan is Plan.RUN_FOR_STATE,
        prepares_again=bool(parts) and parts_of(query) not in ([], parts),
        commits=query.visible().count(LAST) > before,
        older=older,
        seen=query.visible().count(LAST),
    )


@pytest.mark.parametrize("held", ROWS, ids="-".join)
def test_the_engine_does_what_the_specification_says(held: Held, moments: Path, tmp_path: Path) -> None:
    query = composed(held, moments, tmp_path)
    assert played(query, held.commits) == outcome(held)


def test_the_page_has_the_table_of_the_specification() -> None:
    """Write it anew by `PYTHONPATH=tests python -m model.state_table`."""
    assert "\n".join(table()) in PAGE.read_text()
