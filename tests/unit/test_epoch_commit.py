"""What Spark has decided is committed: at the next start, and at the end of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from folder_sink import FolderSink
from query_by_hand import Query

from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from epochsink.protocol.coordinator import Coordinator
    from epochsink.sink import Committable, Epoch, LastDone


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


class Wide:
    """Commits all parts but one side by side, and notes what it is asked for."""

    def __init__(self, committer: Any, left: int) -> None:
        self._committer, self._left = committer, left
        self.alone: list[Committable] = []
        self.went_back = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._committer, name)

    def commit_at_once(self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None) -> set[int]:
        if self.went_back:
            raise WentBack("the target was set back")
        committed = set(range(len(parts))) - {self._left}
        for index in sorted(committed):
            self._committer.commit(epoch, parts[index], None, after)
        return committed

    def commit(self, epoch: Epoch, part: Committable, *rest: Any) -> Any:
        self.alone.append(part)
        return self._committer.commit(epoch, part, *rest)


def three_tasks(tmp_path: Path) -> tuple[Query, Coordinator, Wide, list[Committable]]:
    """Decide an epoch of three tasks, each of them a part."""
    query = Query(tmp_path)
    folder: Any = FolderSink(str(tmp_path / "sink"))
    query.sink = folder
    driver = query.driver()
    wide: Any = Wide(driver._sinks["out"], left=1)
    driver._sinks["out"] = wide
    query.plan(0)
    driver.settle(0)
    epoch = driver.begin(0)
    tasks = [query.task(driver, epoch, (number,)) for number in range(3)]
    driver.record(epoch, {"out": tasks}, {})
    query.decide(0)
    return query, driver, wide, [part for _, part in tasks]


def test_what_a_sink_has_not_committed_side_by_side_is_committed_by_itself(tmp_path: Path) -> None:
    query, driver, wide, parts = three_tasks(tmp_path)
    assert driver.commit_decided()
    assert wide.alone == [parts[1]]
    assert query.visible() == [0, 1, 2]


def test_a_target_that_went_back_stops_all_parts_of_an_epoch(tmp_path: Path) -> None:
    query, driver, wide, _ = three_tasks(tmp_path)
    wide.went_back = True
    with pytest.raises(WentBack, match="sink 'out': the target was set back"):
        driver.commit_decided()
    assert wide.alone == []
    assert query.visible() == []
