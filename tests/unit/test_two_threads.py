"""What the stream thread and the commit thread ask of each other."""

from __future__ import annotations

from typing import Any

import pytest

from epochsink.protocol.commit_queue import CommitQueue
from epochsink.protocol.two_threads import TwoThreads


class Checkpoint:
    """Has decided some epochs."""

    def __init__(self, *decided: int) -> None:
        self.decided = decided

    def has_commit(self, epoch: int) -> bool:
        return epoch in self.decided


class Face(TwoThreads):
    """The coordinator's face alone."""

    def __init__(self, *decided: int) -> None:
        self._queue = CommitQueue()
        untyped: Any = Checkpoint(*decided)
        self._checkpoint = untyped


@pytest.mark.parametrize(("pending", "expected"), [([], False), ([3], True), ([4], False), ([4, 3], False)])
def test_only_the_oldest_pending_epoch_can_be_under_way(pending: list[int], expected: bool) -> None:  # noqa: FBT001
    face = Face(3)
    for epoch in pending:
        face._queue.add(epoch)
    assert face.has_decided() is expected
    assert list(face.pending) == pending


def test_after_a_failure_nothing_is_under_way_and_who_waits_is_told() -> None:
    face = Face(3)
    face._queue.add(3)
    face.fail(OSError("broken"))
    assert not face.has_decided()
    with pytest.raises(OSError, match="broken"):
        face.wait_settled()
    with pytest.raises(OSError, match="broken"):
        face.raise_failure()
