"""A run of a query: which failures are worth another attempt in the same batch, and what it does as the query ends."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import uuid
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import Mock

import pytest
from psycopg import errors as psycopg_errors

from epochsink.elasticsearch.errors import RequestRefused, explained
from epochsink.errors import (
    Addresses,
    ConfigurationError,
    EpochsinkError,
    OutcomeUnknown,
    PrepareFailed,
    RowsRejected,
    WentBack,
)
from epochsink.kafka.errors import error as kafka_error
from epochsink.postgres import Postgres
from epochsink.postgres.errors import failure as postgres_failure
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.progress_tracker import ProgressTracker
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage, refuse_unconditional_create
from epochsink.retry import retrying
from epochsink.spark import epoch_attempts, query_run
from epochsink.spark.epoch_attempts import ATTEMPTS, EpochAttempts
from epochsink.spark.error_translation import FailedEpoch
from epochsink.spark.query_run import Run, RunSettings
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from epochsink.sink import Sink


def _run(tmp_path: Path) -> Run:
    root = tmp_path / "checkpoint"
    return Run(
        RunSettings({"out": LocalSink(tmp_path / "sink")}, application="app-1", reference="pipeline:sink"),
        OpenCheckpoint(LocalStorage(root), str(root), Spool.beside(str(root))),
        str(uuid.uuid4()),
        driver=uuid.uuid4().hex,
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = _run(tmp_path)
    yield made
    made.release()


def test_rows_are_not_retained_for_nobody(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    opened = OpenCheckpoint(LocalStorage(root), str(root), Spool.beside(str(root)))
    sinks: dict[str, dict[str, Sink]] = {
        "none of these sinks": {"out": LocalSink(tmp_path / "sink")},
        "sink 'table' has spool=False": {
            "table": Postgres("postgresql:///shop", table="orders", atomic=False, spool=False)
        },
    }
    for named, each in sinks.items():
        with pytest.raises(ConfigurationError, match=named):
            Run(RunSettings(each, retain_seconds=60.0), opened, str(uuid.uuid4()), driver=uuid.uuid4().hex)


class Execution:
    """A query of Spark's, as far as the commit thread and the attempts ask it."""

    run_id = query_id = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"

    def __init__(self, *, unrepeatable: Sequence[str] = ()) -> None:
        self.alive = self.active = True
        self._unrepeatable = list(unrepeatable)

    def is_alive(self) -> bool:
        return self.alive

    def is_active(self) -> bool:
        return self.active

    def has_state(self) -> bool:
        return bool(self._unrepeatable)

    def unrepeatable_state(self) -> list[str]:
        return self._unrepeatable


class Steps:
    """Coordinator and writer in one. Each step is noted; it raises its failures in turn, nothing for None."""

    def __init__(self, plan: Plan = Plan.WRITE, **failures: Sequence[Exception | None]) -> None:
        self.plan = plan
        self.progress = ProgressTracker()
        self.failures = {step: list(each) for step, each in failures.items()}
        self.taken: list[str] = []

    def _take(self, step: str) -> None:
        self.taken.append(step)
        failure = self.failures[step].pop(0) if self.failures.get(step) else None
        if failure is not None:
            raise failure

    @contextmanager
    def planned(self, _frame: object) -> Iterator[Future[str]]:
        plan: Future[str] = Future()
        plan.set_result("plan")
        yield plan

    def settle(self, _number: int) -> Plan:
        self._take("settle")
        return self.plan

    def begin(self, number: int) -> int:
        return number

    def write(self, _plan: object, _epoch: object) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        self._take("write")
        return {}, {}, {}

    def abandon(self, _epoch: object) -> None:
        self._take("abandon")

    def record(self, *_: object) -> None:
        self._take("record")

    def prepare(self, *, has_state: bool = False, state_format: str = "1", goes_on: bool = True) -> None:
        """Prepare one epoch with these steps."""
        steps: Any = self
        query: Any = SimpleNamespace(has_state=has_state, goes_on=lambda: goes_on)
        settings = {"spark.sql.streaming.stateStore.checkpointFormatVersion": state_format}
        frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(conf=settings))
        EpochAttempts(steps, steps).prepare(frame, 0, query)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts follow one another at once."""
    monkeypatch.setattr(epoch_attempts, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(epoch_attempts, "LONGEST_PAUSE_SECONDS", 0.001)


def of_elasticsearch(status: int) -> EpochsinkError:
    with pytest.raises(PrepareFailed) as raised, explained(PrepareFailed, "writing"):
        raise RequestRefused(status, {"error": {"type": "x", "reason": "y"}}, "ApiError")
    return raised.value


def of_kafka(code: int) -> EpochsinkError:
    native: Any = SimpleNamespace(code=code, text="no")
    return kafka_error(native, "writing")


PASSING = [
    PrepareFailed("the sink of a third party says no more"),
    postgres_failure(psycopg_errors.DeadlockDetected(), "merging"),
    postgres_failure(psycopg_errors.AdminShutdown(), "merging"),
    postgres_failure(psycopg_errors.ReadOnlySqlTransaction(), "merging"),
    postgres_failure(psycopg_errors.InternalError_(), "merging"),
    of_kafka(19),
    of_kafka(-185),
    of_elasticsearch(503),
]
STANDING = [
    RowsRejected("too long"),
    postgres_failure(psycopg_errors.InsufficientPrivilege(), "merging"),
    postgres_failure(psycopg_errors.UndefinedTable(), "merging"),
    postgres_failure(psycopg_errors.NotNullViolation(), "merging"),
    of_kafka(29),
    of_kafka(10),
    of_elasticsearch(403),
]


def as_a_task_sends_it(failure: EpochsinkError) -> EpochsinkError:
    found = EpochsinkError.from_text(f"Traceback ...\n{failure.to_line()}\n")
    assert found is not None
    return found


@pytest.mark.parametrize("failure", PASSING, ids=lambda failure: str(failure).partition("\n")[0])
def test_what_may_pass_is_attempted_again(failure: EpochsinkError) -> None:
    for way in (failure, as_a_task_sends_it(failure), pickle.loads(pickle.dumps(failure))):  # noqa: S301 - our own
        steps = Steps(write=[way])
        steps.prepare()
        assert steps.taken == ["settle", "write", "abandon", "settle", "write", "record"]


@pytest.mark.parametrize("failure", STANDING, ids=lambda failure: str(failure).partition("\n")[0])
def test_what_somebody_has_to_mend_is_not_attempted_again(failure: EpochsinkError) -> None:
    for way in (failure, as_a_task_sends_it(failure), pickle.loads(pickle.dumps(failure))):  # noqa: S301 - our own
        steps = Steps(write=[way])
        with pytest.raises(type(way)):
            steps.prepare()
        assert steps.taken == ["settle", "write", "abandon"]


def test_a_failure_that_stays_is_raised_after_the_last_attempt() -> None:
    steps = Steps(record=[PrepareFailed("the sink votes no")] * 2 * ATTEMPTS)
    with pytest.raises(PrepareFailed, match="votes no"):
        steps.prepare()
    assert steps.taken.count("record") == ATTEMPTS


def test_a_query_that_was_ended_makes_no_other_attempt() -> None:
    steps = Steps(write=[PrepareFailed("the server was restarted")])
    with pytest.raises(PrepareFailed):
        steps.prepare(goes_on=False)
    assert steps.taken.count("settle") == 1


def test_a_store_that_fails_is_asked_again_unless_the_record_may_be_written() -> None:
    """Whether it is, only the next driver can read: another attempt would be recorded beside it."""
    steps = Steps(settle=[OSError("503 Slow Down")])
    steps.prepare()
    assert steps.taken == ["settle", "settle", "write", "record"]
    steps = Steps(write=[OSError("503 Slow Down")], record=[OSError("no answer")])
    with pytest.raises(OSError, match="no answer"):
        steps.prepare()
    assert steps.taken == ["settle", "write", "abandon", "settle", "write", "record"]
    steps = Steps(write=[None, OSError("503 Slow Down")], record=[PrepareFailed("the sink votes no")])
    steps.prepare()
    assert steps.taken == ["settle", "write", "record", "settle", "write", "abandon", "settle", "write", "record"]


@pytest.mark.parametrize(("has_state", "state_format", "attempts"), [(True, "2", 1), (True, "1", 2), (False, "2", 2)])
def test_where_spark_keeps_the_state_of_the_first_attempt_there_is_one(
    has_state: bool,  # noqa: FBT001
    state_format: str,
    attempts: int,
) -> None:
    steps = Steps(record=[PrepareFailed("the sink votes no")])
    with suppress(PrepareFailed):
        steps.prepare(has_state=has_state, state_format=state_format)
    assert steps.taken.count("record") == attempts


def test_an_epoch_that_is_recorded_runs_for_its_state_and_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(epoch_attempts, "run_for_state", ran.append)
    steps = Steps(Plan.RUN_FOR_STATE)
    steps.prepare()
    assert steps.taken == ["settle"]
    assert len(ran) == 1


def test_nothing_goes_on_once_a_commit_has_failed_or_the_query_was_ended(run: Run) -> None:
    execution: Any = Execution()
    run.bind(execution)
    query = run._query
    assert query is not None
    assert query.goes_on()
    execution.active = False
    assert not query.goes_on()
    execution.active = True
    query._commit_thread.failure = RuntimeError("the commit thread gave up")
    assert not query.goes_on()
    query._commit_thread.failure = None
    execution.alive = False
    run.join()
    assert run.has_ended()


@pytest.mark.parametrize("known", [(), ("Type: the command",)], ids=["of-this-epoch", "of-an-earlier-epochs-commit"])
def test_an_epoch_that_raises_an_earlier_commits_failure_is_not_named_as_the_failed_one(known: tuple[str, ...]) -> None:
    told: list[EpochsinkError] = []
    execution: Any = SimpleNamespace(is_active=lambda: True, end_from_within=told.append, raised=lambda error: error)
    failed = FailedEpoch(addresses, lambda number: [f"Epoch: {number}"], lambda _: None, show_values=False)
    with pytest.raises(RowsRejected), failed.told_to_spark(8, execution):
        raise RowsRejected("epoch 7 is refused", notes=known)
    assert told[0].notes == (known or ("Type: epochsink status /lake/orders", "Epoch: 8"))


def addresses() -> Addresses:
    return Addresses("/lake/orders")


def _to_accept() -> WentBack:
    return WentBack("the target was set back", hint="type: epochsink accept CHECKPOINT 3")


def test_the_commands_in_an_error_name_the_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever an error leaves the library: from an epoch, from the commit thread, and from a start."""
    execution: Any = SimpleNamespace(is_active=lambda: True, end_from_within=lambda _: None, raised=lambda error: error)
    failed = FailedEpoch(addresses, lambda _: [], lambda _: None, show_values=False)
    with pytest.raises(WentBack, match="accept /lake/orders 3"), failed.told_to_spark(8, execution):
        raise _to_accept()

    def refuse(_coordinator: object) -> None:
        raise _to_accept()

    running: Any = Execution()
    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, "commit_decided", refuse)
        run._coordinator.queue.add(3)
        run.bind(running)
        with pytest.raises(WentBack, match=f"accept {tmp_path / 'checkpoint'} 3"):
            run.settled()
        running.alive = False
        with pytest.raises(WentBack, match=f"accept {tmp_path / 'checkpoint'} 3"):
            run.join()
    monkeypatch.setattr(Coordinator, "recover", refuse)
    with pytest.raises(WentBack, match=f"accept {tmp_path / 'checkpoint'} 3"):
        _run(tmp_path)


def test_a_second_call_in_an_epoch_is_refused_unless_the_first_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [PrepareFailed("the server was restarted")]

    def prepare(*_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(run._attempts, "prepare", prepare)
    execution: Any = Execution()
    run.bind(execution)
    frame: Any = None
    with pytest.raises(PrepareFailed):
        run.foreach_batch(frame, 0)
    run.foreach_batch(frame, 0)
    with pytest.raises(ConfigurationError, match="called twice in epoch 0"):
        run.foreach_batch(frame, 0)
    execution.alive = False
    with pytest.raises(ConfigurationError, match="called twice in epoch 0"):
        run.join()


def test_a_refused_call_stops_the_commits_too(run: Run) -> None:
    """The next start commits: it knows from the ledger whether the record has all rows."""
    execution: Any = Execution()
    run.bind(execution)
    with pytest.raises(ConfigurationError, match="called twice"):
        run.refuse_call(0, ConfigurationError("called twice", hint="call it once"))
    execution.alive = False
    with pytest.raises(ConfigurationError, match="called twice"):
        run.join()


def test_state_that_does_not_repeat_is_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    chance: Any = Execution(unrepeatable=["rand()", "uuid()"])
    run.bind(chance)
    chance.alive = False
    run.join()
    assert "may give another result when an epoch runs again: rand(), uuid()." in caplog.text


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/checkpoint/epochsink/ledger/7")


def test_a_full_disk_ends_the_commits_with_the_epoch_and_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a bare OSError, which names no epoch."""
    coordinator: Any = run._coordinator

    def recorded_meanwhile() -> NoReturn:
        coordinator.queue.add(7)
        raise FULL

    monkeypatch.setattr(coordinator, "drain", recorded_meanwhile)
    execution: Any = Execution()
    execution.alive = False
    run.bind(execution)
    with pytest.raises(OutcomeUnknown, match=r"were committed \(pending: 7\): .*No space left on device") as told:
        run.join()
    assert told.value.hint.startswith("the disk is full: free space on it")
    assert "Type: epochsink status" in str(told.value)


def test_a_full_disk_at_a_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "create", Mock(side_effect=FULL))
    with pytest.raises(OutcomeUnknown, match="No space left on device") as told:
        _run(tmp_path)
    assert told.value.hint.startswith("the disk is full")


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "read-only"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "ulimit -f"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (OSError("An error occurred while calling o7.create: java.io.IOException: No space left on device"), "full"),
        (OSError("the object store failed: 503 Slow Down"), "give a folder"),
    ],
)
def test_the_remedy_follows_from_the_cause(tmp_path: Path, failure: OSError, told: str) -> None:
    """Also where only the JVM's words tell it."""
    files: Any = SimpleNamespace(create=Mock(side_effect=failure), remove_many=Mock())
    with pytest.raises(ConfigurationError) as refused:
        refuse_unconditional_create(files, str(tmp_path))
    assert told in refused.value.hint


def test_a_store_that_fails_for_a_moment_does_not_keep_a_record_from_being_disputed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver would take the record for whole; where it cannot be disputed, the error says what to do first."""
    coordinator: Any = run._coordinator
    failures = [OSError("no route to host")] * (2 * ATTEMPTS - 1)
    disputed: list[int] = []

    def dispute(number: int) -> None:
        if failures:
            raise failures.pop()
        disputed.append(number)

    monkeypatch.setattr(coordinator, "dispute", dispute)
    monkeypatch.setattr(query_run, "retrying", partial(retrying, first_pause=0.001))
    mistake = ConfigurationError("called twice", hint="call it once")
    with pytest.raises(ConfigurationError, match="could not be noted: no route to host") as told:
        run.refuse_call(3, mistake)
    assert told.value.hint.startswith("start the query once more with the code as it is")
    with pytest.raises(ConfigurationError, match="called twice") as as_it_is:
        run.refuse_call(3, mistake)
    assert as_it_is.value is mistake
    assert disputed == [3]


_ENDS = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from epochsink.spark.running_query import _flush_at_exit

class CommitThread(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.asked = threading.Event()

    def run(self):
        self.asked.wait()
        with ThreadPoolExecutor(1) as pool:
            print(pool.submit(str, "committed").result())

    def flush(self):
        self.asked.set()
        self.join()

atexit.register(print, "the end")
living = CommitThread()
living.start()
_flush_at_exit(living)
"""


def test_what_is_decided_as_the_program_ends_is_committed_by_whatever_threads_that_takes() -> None:
    """Requests in parallel among them: at its very end, the interpreter lets nobody begin any."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["committed", "the end"], done.stderr
