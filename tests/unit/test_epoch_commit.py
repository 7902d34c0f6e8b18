"""What Spark has decided is committed: at the next start, and at the end of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_a_decided_epoch_is_committed_at_the_next_start(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    query.decide(0)
    query.driver()
    assert query.visible() == [1]


def test_draining_commits_what_is_decided_and_leaves_the_rest(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    driver.drain()
    assert query.visible() == []
    query.decide(0)
    driver.drain()
    assert query.visible() == [1]
