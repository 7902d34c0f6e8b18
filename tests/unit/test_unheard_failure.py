"""A first batch that fails in us is reported, whatever the checkpoint's store does meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from epochsink.spark import unheard_failure
from epochsink.spark.unheard_failure import UnheardFailure

SECONDS = 20.0


class FakeExecution:
    """A query that runs until it is made to fail."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def is_alive(self) -> bool:
        return self.failure is None

    def fail(self, failure: BaseException) -> None:
        self.failure = failure


class Decided:
    """A checkpoint in which Spark has decided every epoch."""

    def has_commit(self, epoch: int) -> bool:
        return epoch >= 0


def test_a_store_that_fails_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unheard_failure, "LOOK_SECONDS", 0.001)
    first, answers = ValueError("the first error"), [RuntimeError("503"), OSError("no route to host")]

    def opened() -> Decided:
        if answers:
            raise answers.pop()
        return Decided()

    execution: Any = FakeExecution()
    watch: Any = UnheardFailure(execution, opened, 0, first)  # type: ignore[arg-type]
    watch.start()
    watch.join(SECONDS)
    assert execution.failure is first
    with pytest.raises(ValueError, match="the first error"):
        watch.raise_unheard()
