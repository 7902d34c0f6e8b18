"""The commit thread commits what is decided, drains when the stream has ended, and tells the stream of a failure."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from query_by_hand import Query

from epochsink import ExactlyOnce
from epochsink.errors import ConfigurationError
from epochsink.protocol import commit_thread
from epochsink.protocol.commit_thread import CommitThread
from epochsink.protocol.progress_tracker import ProgressTracker
from epochsink.spark.query_handle import ExactlyOnceQuery
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from epochsink.protocol.progress import EpochProgress

SECONDS = 20


class FakeCoordinator:
    """Says what it was asked to do, in order; fails where it is told to."""

    def __init__(self, *, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.failure: BaseException | None = None
        self.undecided = 0
        self.unseen = 0
        self.pauses: list[float] = []
        self.asked = threading.Event()
        self.queue = self
        self.progress = ProgressTracker()

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if self.fails == name:
            raise OSError(f"{name} failed")

    def commit_decided(self) -> bool:
        self.asked.set()
        self._do("commit_decided")
        self.undecided -= 1
        return self.undecided < 0

    def wait_pending(self, seconds: float) -> None:
        assert seconds > 0

    def wait_run(self, seconds: float) -> None:
        self.pauses.append(seconds)
        time.sleep(seconds)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        self._do("drain")

    def tidy(self) -> None:
        self._do("tidy")

    def fail(self, failure: BaseException) -> None:
        self.failure = failure

    def note_failure(self, failure: str) -> None:
        self.progress.failed(failure)

    def has_decided(self) -> bool:
        self.unseen -= 1
        return self.unseen >= 0


class FakeStream:
    """A stream that runs until it is told otherwise."""

    def __init__(self, *, stops_on: str = "stop") -> None:
        self.alive = True
        self.released = 0
        self.told: list[str] = []
        self.stops_on = stops_on

    def is_alive(self) -> bool:
        return self.alive

    def is_in_batch(self) -> bool:
        return False

    def report(self, failure: BaseException) -> BaseException:
        return failure

    def interrupt(self) -> None:
        self._tell("interrupt")

    def stop(self) -> None:
        self._tell("stop")

    def release(self) -> None:
        assert not self.alive
        self.released += 1

    def _tell(self, what: str) -> None:
        self.told.append(what)
        self.alive = what != self.stops_on


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIVENESS_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(commit_thread, name, 0.01)


def start(coordinator: FakeCoordinator, stream: FakeStream) -> CommitThread:
    untyped: Any = coordinator
    thread = CommitThread(untyped, stream, 0.001)
    thread.start()
    return thread


def test_it_commits_while_the_stream_runs_and_drains_when_it_has_ended() -> None:
    coordinator, stream = FakeCoordinator(), FakeStream()
    thread = start(coordinator, stream)
    assert coordinator.asked.wait(SECONDS)
    stream.alive = False
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert thread.failure is None
    assert coordinator.calls[0] == "commit_decided"
    assert coordinator.calls[-2:] == ["drain", "tidy"]
    assert stream.told == []
    assert stream.released == 1


def run_until_decided(coordinator: FakeCoordinator, stream: FakeStream) -> None:
    """Run a commit thread until it has seen the decision, and let the stream end."""
    thread = start(coordinator, stream)
    deadline = time.monotonic() + SECONDS
    while coordinator.undecided >= 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    stream.alive = False
    thread.join(SECONDS)


def test_it_looks_again_until_an_epoch_is_decided() -> None:
    coordinator, stream = FakeCoordinator(), FakeStream()
    coordinator.undecided = 5
    run_until_decided(coordinator, stream)
    assert coordinator.calls.count("commit_decided") >= 6


def test_its_looks_grow_rarer_the_longer_spark_takes() -> None:
    """Each look is a request to the store; the end of a long wait may be seen later than that of a short one."""
    coordinator, stream = FakeCoordinator(), FakeStream()
    coordinator.undecided = 150
    run_until_decided(coordinator, stream)
    pauses = coordinator.pauses[:150]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.001, commit_thread.LONGEST_IN_POLLS * 0.001)


@pytest.mark.parametrize("fails", ["commit_decided", "drain"])
def test_a_failure_is_kept_and_nothing_follows_it(fails: str) -> None:
    coordinator, stream = FakeCoordinator(fails=fails), FakeStream()
    stream.alive = fails != "drain"
    thread = start(coordinator, stream)
    thread.join(SECONDS)
    assert str(thread.failure) == f"{fails} failed"
    assert coordinator.failure is thread.failure
    assert coordinator.calls[-1] == fails
    assert stream.released == 1, "of a query whose end nobody waits for, too"


def test_a_run_that_has_failed_commits_nothing_as_its_stream_ends() -> None:
    """The next start does: the ledger may say by then that the record lacks rows."""
    coordinator, stream = FakeCoordinator(), FakeStream()
    stream.alive = False
    coordinator.failure = OSError("called twice")
    thread = start(coordinator, stream)
    thread.join(SECONDS)
    assert str(thread.failure) == "called twice"
    assert "drain" not in coordinator.calls


@pytest.mark.parametrize(("stops_on", "told"), [("interrupt", ["interrupt"]), ("stop", ["interrupt", "stop"])])
def test_an_idle_stream_is_made_to_fail(stops_on: str, told: list[str]) -> None:
    """No batch comes that would raise the failure: first gently, so that the query shows it, then for good."""
    coordinator, stream = FakeCoordinator(fails="commit_decided"), FakeStream(stops_on=stops_on)
    start(coordinator, stream).join(SECONDS)
    assert stream.told == told


class Handle:
    """Spark's own of a query: it waits for the stream thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.stopping = threading.Event()

    def stop(self) -> None:
        self.stopping.set()
        self.ended.wait(SECONDS)

    def awaitTermination(self) -> None:  # noqa: N802 - Spark's name
        self.ended.wait(SECONDS)

    processAllAvailable = awaitTermination  # noqa: N815 - likewise


def told_by(query: Query, listener: Callable[[EpochProgress], None]) -> None:
    """Let a commit thread tell a listener of an epoch, and let the stream end."""
    stream = FakeStream()
    driver = query.driver(listener=listener)
    query.prepare(driver, 0, 0)
    query.decide(0)
    thread = CommitThread(driver, stream, 0.001)
    began = time.monotonic()
    thread.start()
    driver.queue.wait_settled()
    stream.alive = False
    thread.join(SECONDS)
    assert time.monotonic() - began < SECONDS / 2


def test_a_query_may_be_stopped_by_its_progress(tmp_path: Path) -> None:
    """Spark's stop waits for the stream thread, which may wait for this one to commit the next epoch."""
    handle, once = Handle(), ExactlyOnce(checkpoint=str(tmp_path), sinks={"out": LocalSink(tmp_path / "sink")})
    told_by(Query(tmp_path), lambda _: ExactlyOnceQuery(handle, once).stop())
    assert handle.stopping.wait(SECONDS)
    handle.ended.set()


def test_what_waits_for_commits_is_refused_in_the_thread_that_commits(tmp_path: Path) -> None:
    handle, once = Handle(), ExactlyOnce(checkpoint=str(tmp_path), sinks={"out": LocalSink(tmp_path / "sink")})
    query = ExactlyOnceQuery(handle, once)
    waits: list[Callable[[], object]] = [query.awaitTermination, query.processAllAvailable]
    waits += [once.await_settled, once.await_commits, once.await_committed]
    refused: list[str] = []

    def listen(_: EpochProgress) -> None:
        for wait in waits:
            try:
                wait()
            except ConfigurationError as error:
                refused.append(error.message)

    told_by(Query(tmp_path), listen)
    assert [text.partition(" called")[0] for text in refused] == ["on_progress="] * len(waits)


def test_the_end_of_the_program_waits_for_a_decided_epoch() -> None:
    coordinator, stream = FakeCoordinator(), FakeStream()
    coordinator.unseen = 3
    thread = start(coordinator, stream)
    thread.flush()
    assert coordinator.unseen == -1, "looked at until nothing decided was pending"
    stream.alive = False
    thread.join(SECONDS)
