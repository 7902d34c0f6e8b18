"""What no recorded epoch names is ended; what the ledger names never is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_what_nobody_recorded_is_aborted_at_the_next_start(query: Query) -> None:
    driver = query.driver()
    query.plan(0)
    driver.settle(0)
    query.task(driver, driver.begin(0), (1,))
    query.driver()
    assert query.sink.prepared() == []
    assert not list((query.folder.parent / "sink").glob("*/written/*"))


def test_tidying_ends_nothing_while_an_epoch_is_pending(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    prepared = query.sink.prepared()
    driver.tidy()
    assert query.sink.prepared() == prepared
