"""A driver compares what ledger and checkpoint say before it changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

from epochsink.errors import WentBack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_decided_epochs_without_a_ledger_are_refused(query: Query) -> None:
    query.plan(0)
    query.decide(0)
    with pytest.raises(WentBack, match="holds no record of them"):
        query.driver()
