"""Which failures of an epoch are worth another attempt in the same batch: what the families' tables of errors say."""

from __future__ import annotations

import pickle
import subprocess
import sys
import uuid
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import elasticsearch
import pytest
from elastic_transport import ApiResponseMeta, HttpHeaders, NodeConfig
from psycopg import errors as psycopg_errors

from epochsink.elasticsearch.errors import explained
from epochsink.errors import ConfigurationError, EpochsinkError, PrepareFailed, RowsRejected
from epochsink.kafka.errors import error as kafka_error
from epochsink.postgres.errors import failure as postgres_failure
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.retry import retrying
from epochsink.spark import query_run
from epochsink.spark.query_run import Run
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    root = tmp_path / "checkpoint"
    made = Run(
        sinks={"out": LocalSink(tmp_path / "sink")},
        files=LocalStorage(root),
        spool=Spool.beside(str(root)),
        query_id=str(uuid.uuid4()),
        location=str(root),
        join_running=False,
        executors=None,
        application="app-1",
        show_values=False,
    )
    execution: Any = SimpleNamespace(is_active=lambda: True)
    made.execution = execution
    yield made
    made.join()


def of_elasticsearch(status: int) -> EpochsinkError:
    meta = ApiResponseMeta(status, "1.1", HttpHeaders(), 0.1, NodeConfig("http", "localhost", 9200))
    with pytest.raises(PrepareFailed) as raised, explained(PrepareFailed, "writing"):
        raise elasticsearch.ApiError("no", meta, {"error": {"type": "x", "reason": "y"}})
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
def test_what_may_pass_is_attempted_again(run: Run, failure: EpochsinkError) -> None:
    for way in (failure, as_a_task_sends_it(failure), pickle.loads(pickle.dumps(failure))):  # noqa: S301 - our own
        assert run._may_pass(way)


@pytest.mark.parametrize("failure", STANDING, ids=lambda failure: str(failure).partition("\n")[0])
def test_what_somebody_has_to_mend_is_not_attempted_again(run: Run, failure: EpochsinkError) -> None:
    for way in (failure, as_a_task_sends_it(failure), pickle.loads(pickle.dumps(failure))):  # noqa: S301 - our own
        assert not run._may_pass(way)


def test_a_store_that_fails_for_a_moment_does_not_keep_a_record_from_being_disputed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver would take the record for whole; where it cannot be disputed, the error says what to do first."""
    coordinator: Any = run._coordinator
    failures = [OSError("no route to host")] * (2 * query_run.ATTEMPTS - 1)
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
from epochsink.spark.query_run import _flush_at_exit

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
