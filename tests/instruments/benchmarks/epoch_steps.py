"""What the steps of an epoch take: spans around calls of the driver and of its tasks, set from outside.

A span is the wall time of a call and the processor time of its thread; what other threads and processes do meanwhile is
theirs. Nothing is measured twice: a step inside another is shown below it, as a part of it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TASKS_FILE: Final = "EPOCHSINK_BENCH_TASKS"
"""Environment variable that names the file in which tasks note their steps."""

JOB: Final = "Spark job"

DRIVER: Final = (
    ("epochsink.spark.exactly_once", "ExactlyOnce.__call__", "foreachBatch"),
    ("epochsink.spark.classic.stream_execution", "StreamExecution.of_batch", "find the execution"),
    ("epochsink.protocol.coordinator", "Coordinator.settle", "settle"),
    ("epochsink.protocol.consistency", "AppliedCheck.verify", "compare a marker"),
    ("epochsink.protocol.sweep", "Sweep.targets", "sweep"),
    ("epochsink.protocol.coordinator", "Coordinator.begin", "begin"),
    ("epochsink.protocol.coordinator", "Coordinator.contexts", "tell the targets"),
    ("epochsink.kafka.rows_in_log", "LogEnds.note", "look at the log's ends"),
    ("epochsink.spark.epoch_writer", "EpochWriter.plan", "plan"),
    ("epochsink.spark.query_plan", "OnePass.apply", "select"),
    ("epochsink.spark.classic.engine", "ClassicWriteTasks.plan", "map in Arrow"),
    ("epochsink.spark.classic.engine", "ClassicWriteTasks.run", JOB),
    ("epochsink.protocol.coordinator", "Coordinator.record", "record"),
    ("epochsink.protocol.run_state", "CommitQueue.wait_settled", "wait for the epoch before"),
    ("epochsink.protocol.coordinator", "Coordinator._vote", "vote"),
    ("epochsink.postgres.database", "Database.merge", "merge"),
    ("epochsink.postgres.incoming", "Incoming.copy", "copy"),
    ("epochsink.postgres.database", "Database.prepare", "prepare"),
    ("epochsink.kafka.rows_in_log", "LogEnds.added", "look at the topic's settings"),
    ("epochsink.kafka.transactions", "Transactions.describe", "describe the transactions"),
    ("epochsink.protocol.checkpoint", "Checkpoint.offsets_digest", "offsets"),
    ("epochsink.protocol.ledger", "Ledger.verify", "look at the ledger"),
    ("epochsink.protocol.ledger", "Ledger.append", "append to the ledger"),
    ("epochsink.protocol.commits", "Commits.commit", "commit thread"),
    ("epochsink.protocol.checkpoint", "Checkpoint.make_durable", "make commits/N durable"),
    ("epochsink.protocol.commits", "Commits._commit_parts", "commit the parts"),
    ("epochsink.elasticsearch.applied_epochs", "claim", "claim the epoch"),
    ("epochsink.elasticsearch.target_index", "require_same", "look at the index"),
    ("epochsink.elasticsearch.bulk_request", "Poster.post", "bulk request"),
    ("epochsink.elasticsearch.applied_epochs", "write", "write the marker"),
    ("epochsink.kafka.witness", "Witness.look", "look at the leaders"),
    ("epochsink.kafka.transactions", "Transactions.end", "end the transaction"),
    ("epochsink.postgres.commit", "Commit.all_of", "commit what is prepared"),
    ("epochsink.kafka.committer", "KafkaParticipant.await_visible", "wait until visible"),
    ("epochsink.protocol.commits", "Commits._clear", "clear"),
)
"""Module, name and what the step is called."""

COUNTED: Final = (
    ("py4j.clientserver", "ClientServerConnection.send_command", "py4j"),
    ("os", "fsync", "fsync"),
    ("epochsink.kafka.cluster", "Cluster._exchange", "requests"),
    ("psycopg", "Connection.wait", "requests"),
    ("elastic_transport", "Transport.perform_request", "requests"),
)
"""Calls that are counted in the steps in which they happen."""


@dataclass
class Span:
    """The sums of one step of one epoch."""

    wall: float = 0.0
    processor: float = 0.0
    calls: int = 0
    counted: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Steps:
    """Collects spans by their path, e.g. ``("foreachBatch", "settle")``, and by epoch."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self._open: dict[tuple[str, ...], Span] = {}
        self._epochs: list[dict[tuple[str, ...], Span]] = []
        self._jobs: list[tuple[float, float]] = []
        self._decided: dict[int, float] = {}
        self._installed = False

    def install(self) -> None:
        """Wrap what `DRIVER` and `COUNTED` name, once."""
        if self._installed:
            return
        self._installed = True
        for module, name, label in DRIVER:
            _wrap(module, name, functools.partial(self._timed, label))
        for module, name, label in COUNTED:
            _wrap(module, name, functools.partial(self._counted, label))
        _wrap("epochsink.protocol.progress_tracker", "ProgressTracker.decided", self._noted)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function for foreachBatch that begins another epoch with each call."""

        def call(*given: Any) -> None:
            with self._lock:
                self._epochs.append(self._open)
                self._open = {}
            function(*given)

        return call

    def forget(self) -> None:
        """Begin anew: what was measured so far was a warming up."""
        with self._lock:
            self._epochs, self._jobs, self._decided = [], [], {}

    def _path(self) -> list[str]:
        if not hasattr(self._here, "path"):
            self._here.path = []
        path: list[str] = self._here.path
        return path

    def _span(self, path: tuple[str, ...]) -> Span:
        return self._open.setdefault(path, Span())

    def _timed(self, label: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        path = self._path()
        path.append(label)
        at, began, worked = time.time(), time.perf_counter(), time.thread_time()
        try:
            return call(*given, **named)
        finally:
            wall, processor = time.perf_counter() - began, time.thread_time() - worked
            with self._lock:
                if label == JOB:
                    self._jobs.append((at, at + wall))
                span = self._span(tuple(path))
                span.wall, span.processor, span.calls = span.wall + wall, span.processor + processor, span.calls + 1
            path.pop()

    def _counted(self, label: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        path = tuple(self._path())
        with self._lock:
            for length in range(1, len(path) + 1):
                self._span(path[:length]).counted[label] += 1
        return call(*given, **named)

    def _noted(self, call: Callable[..., Any], tracker: Any, number: int) -> Any:
        with self._lock:
            self._decided.setdefault(number, time.time())
        return call(tracker, number)

    def jobs(self) -> list[tuple[float, float]]:
        """Return begin and end of each write job, in seconds since 1970."""
        with self._lock:
            return list(self._jobs)

    def seen_after(self, decided: Mapping[str, float]) -> float:
        """Return the median milliseconds from ``commits/N`` until the driver saw it, by when Spark wrote it."""
        with self._lock:
            late = [self._decided[int(name)] - at for name, at in decided.items() if int(name) in self._decided]
        return statistics.median(late) * 1000 if late else 0.0

    def rows(self) -> list[list[Any]]:
        """Return a row for each step: its depth and name, its wall and processor milliseconds, what is counted."""
        epochs = self._epochs[1:]
        paths = sorted({path for epoch in epochs for path in epoch}, key=_in_order)
        found = []
        for path in paths:
            spans = [epoch.get(path, Span()) for epoch in epochs]
            wall, processor = (statistics.median(getattr(span, of) for span in spans) * 1000 for of in _TIMES)
            counts = [statistics.median(span.counted[label] for span in spans) for label in COUNTS]
            found.append([len(path) - 1, path[-1], wall, processor, *counts])
        return found


_TIMES: Final = ("wall", "processor")
COUNTS: Final = tuple(dict.fromkeys(label for _, _, label in COUNTED))
_ORDER: Final = {label: index for index, (_, _, label) in enumerate(DRIVER)}


def _in_order(path: tuple[str, ...]) -> list[int]:
    return [_ORDER[label] for label in path]


def note_tasks() -> None:
    """Let the tasks of this process note their steps in the file that `TASKS_FILE` names."""
    note: dict[str, float] = {}

    def began(call: Callable[..., Any], *given: Any) -> Any:
        note.clear()
        note.update({_AT: time.time(), "began": time.perf_counter(), "worked": time.thread_time()})
        return call(*given)

    def timed(label: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        since = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            note[label] = note.get(label, 0.0) + time.perf_counter() - since

    def first(call: Callable[..., Any], *given: Any) -> Any:
        note.setdefault(FIRST_ROWS, time.perf_counter() - note["began"])
        return call(*given)

    def ended(call: Callable[..., Any], *given: Any) -> Any:
        call(*given)
        took = time.perf_counter() - note["began"]
        told = {name: taken * 1000 for name, taken in note.items() if name not in (_AT, "began", "worked")}
        told |= {WHOLE: took * 1000, "its processor time": (time.thread_time() - note["worked"]) * 1000}
        line = json.dumps(told | {_AT: note[_AT]}) + "\n"
        descriptor = os.open(os.environ[TASKS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    _wrap("pyspark.worker", "check_python_version", began)
    _wrap("pyspark.worker", "setup_spark_files", functools.partial(timed, "files, import caches"))
    _wrap("pyspark.worker", "read_udfs", functools.partial(timed, "read the function"))
    _wrap("pyspark.worker", "report_times", ended)
    for module, name, label in TASK:
        _wrap(module, name, functools.partial(timed, label))
    # around the others: it is noted before them
    _wrap("epochsink.spark.write_task", "_Attempt.write", first)


_AT: Final = "at"
FIRST_ROWS: Final = "until its first rows come"
WHOLE: Final = "the whole task"
TASK: Final = (
    ("epochsink.spark.write_task", "_Attempt._begin", "begin: spool, connection, transaction"),
    ("epochsink.kafka.producer", "TransactionalProducer.__init__", "Kafka: make the client"),
    ("epochsink.kafka.producer", "TransactionalProducer.begin", "Kafka: connect, InitProducerId"),
    ("epochsink.spark.write_task", "_Attempt._write_one", "write, begin included"),
    ("epochsink.kafka.producer", "TransactionalProducer.topic_id", "Kafka: the topic's partitions and id"),
    ("epochsink.kafka.producer", "TransactionalProducer.produce", "Kafka: produce"),
    ("epochsink.spark.write_task", "_Attempt.prepare", "prepare, spool included"),
    ("epochsink.kafka.producer", "TransactionalProducer.flush", "Kafka: flush"),
    ("epochsink.kafka.producer", "TransactionalProducer.mark", "Kafka: the marker's offset"),
    ("epochsink.kafka.producer", "TransactionalProducer.identity", "Kafka: the producer's id"),
    ("epochsink.kafka.producer", "TransactionalProducer.release", "Kafka: end the client"),
    ("epochsink.protocol.spool", "SpoolWriter.close", "close the spool"),
    ("epochsink.spark.write_task", "forget_archives", "forget archives"),
)


def task_medians(jobs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the median milliseconds of what tasks have noted, and forget it. ``jobs`` are begin and end of their jobs.

    Of each job it is also told how long its first task took to reach Python, and its answer to come back after its last
    task.
    """
    notes = Path(os.environ[TASKS_FILE])
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    notes.unlink(missing_ok=True)
    starts, answers = [], []
    for began, ended in jobs:
        own = [(line[_AT], line[_AT] + line[WHOLE] / 1000) for line in lines if began <= line[_AT] < ended]
        if own:
            starts.append((min(start for start, _ in own) - began) * 1000)
            answers.append((ended - max(end for _, end in own)) * 1000)
    medians = {"the job, until its first task is in Python": statistics.median(starts)} if starts else {}
    labels = {label: None for line in lines for label in line if label != _AT}
    medians |= {label: statistics.median(line.get(label, 0.0) for line in lines) for label in labels}
    return medians | ({"the job, after its last task": statistics.median(answers)} if answers else {})


def _wrap(module: str, name: str, around: Callable[..., Any]) -> None:
    """Replace a function or method by one that calls ``around`` with it; nothing where that code has none."""
    try:
        owner: Any = import_module(module)
        *classes, last = name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        call = inspect.getattr_static(owner, last)
    except (ImportError, AttributeError):
        return
    bound = call.__func__ if isinstance(call, (classmethod, staticmethod)) else call

    @functools.wraps(bound)
    def wrapped(*given: Any, **named: Any) -> Any:
        return around(bound, *given, **named)

    setattr(owner, last, type(call)(wrapped) if isinstance(call, (classmethod, staticmethod)) else wrapped)
