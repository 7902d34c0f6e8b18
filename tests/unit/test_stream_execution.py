"""How a query is ended from within its own foreachBatch, and what is concluded if the JVM is gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from epochsink.spark.classic import stream_execution
from epochsink.spark.classic.stream_execution import StreamExecution

LIVES = 20
"""How many interrupts the stream thread survives: Spark catches some on its way to the commit."""


class Java:
    """The JVM's execution, its thread and its ids in one."""

    def __init__(self) -> None:
        self.active = True
        self.interrupts = 0
        self.gone = False

    def queryExecutionThread(self) -> Java:  # noqa: N802 - Java's name, as those below
        return self

    id = runId = queryExecutionThread  # noqa: N815

    def toString(self) -> str:  # noqa: N802
        return "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"

    def isAlive(self) -> bool:  # noqa: N802
        self._answer()
        return self.interrupts < LIVES

    def isActive(self) -> bool:  # noqa: N802
        self._answer()
        return self.active

    def isInterrupted(self) -> bool:  # noqa: N802
        return self.interrupts > 0

    def interrupt(self) -> None:
        self.interrupts += 1

    def _answer(self) -> None:
        if self.gone:
            raise Py4JNetworkError("Answer from Java side is empty")


class Execution(StreamExecution):
    """Gives the error to no JVM."""

    def __init__(self, java: Java, failure: Exception | None = None) -> None:
        super().__init__(java)
        self.java = java
        self.errors: list[str] = []
        self._failure = failure

    def _die_of(self, error: str) -> None:
        # late, as Spark's: the call inside foreachBatch must wait for it
        time.sleep(0.1)
        self.errors.append(error)
        if self._failure is not None:
            raise self._failure
        self.java.active = False


def test_the_failing_call_returns_once_spark_can_run_no_other_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is given first; then the thread is interrupted until it ends: one interrupt may be caught."""
    monkeypatch.setattr(stream_execution, "_END_SECONDS", 2.0)
    execution = Execution(Java())
    execution.end_from_within(ValueError("the function swallows this"))
    assert not execution.is_active()
    assert execution.java.isInterrupted()
    assert execution.errors == ["ValueError: the function swallows this\n"]
    deadline = time.monotonic() + 10
    while (execution.is_alive() or _ours()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert execution.java.interrupts == LIVES
    assert _ours() == []


def _ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("epochsink-")]


def test_a_query_that_cannot_be_given_its_error_is_interrupted() -> None:
    execution = Execution(Java(), Py4JError("no such method"))
    execution.fail(ValueError("no"))
    assert execution.java.interrupts == 1


@pytest.mark.parametrize("asked", ["is_alive", "is_active"])
def test_a_query_ends_with_its_jvm(asked: str) -> None:
    java: Any = Java()
    execution = StreamExecution(java)
    assert getattr(execution, asked)()
    java.gone = True
    assert not getattr(execution, asked)()
