"""A conclusion passes only while the ledger is still ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

from epochsink.errors import Fenced, OutcomeUnknown

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_whoever_is_superseded_concludes_nothing(query: Query) -> None:
    older = query.driver()
    (participant,) = older._run.participants
    with pytest.raises(OutcomeUnknown), older._run.if_ours(participant):
        raise OutcomeUnknown("the target does not say")
    query.driver()
    with pytest.raises(Fenced), older._run.if_ours(participant):
        raise OutcomeUnknown("the target does not say")
