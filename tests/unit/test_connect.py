"""The engine of Spark Connect, as far as it needs no server."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderSink
from hints import commands_in, type_words
from pyspark import cloudpickle
from pyspark.sql.connect.streaming.query import StreamingQuery

import epochsink
from epochsink import ExactlyOnce
from epochsink.errors import Addresses, ConfigurationError, UnsupportedQuery
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.storage import LocalStorage
from epochsink.spark import exactly_once
from epochsink.spark.connect import execution
from epochsink.spark.connect.checkpoint_files import location_of, place_of
from epochsink.spark.connect.engine import CONNECT
from epochsink.spark.connect.execution import ConnectExecution, Started
from epochsink.spark.connect.query_handle import ConnectQuery
from epochsink.spark.connect.recovery import Standing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession


class Session:
    """The settings of a session, and no query."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = settings or {}
        self.conf = self.streams = self

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._settings.get(name, default)


def session(**settings: str) -> SparkSession:
    """Return it in the place of a session."""
    return cast("SparkSession", Session({name.replace("__", "."): value for name, value in settings.items()}))


def made(folder: Path, **options: Any) -> ExactlyOnce:
    """Return an object with every argument."""
    given: dict[str, Any] = {
        "checkpoint": str(folder),
        "sinks": {"folder": FolderSink(str(folder))},
        "spool": str(folder / "spool"),
        "storage_options": {"region": "x"},
        "join_running": True,
        "show_values": True,
    }
    return ExactlyOnce(**{**given, **options})


def _packed(one: ExactlyOnce) -> bytes:
    packed: bytes = cloudpickle.dumps(one)  # type: ignore[no-untyped-call]
    return packed


def sent(one: ExactlyOnce) -> Any:
    """Return what comes out at the other end."""
    return pickle.loads(_packed(one))  # noqa: S301 - its own


class Own(ExactlyOnce):
    """A user's own kind."""

    mark = ""


def test_an_object_is_pickled_by_its_arguments(tmp_path: Path) -> None:
    """Its locks and its run stay where they are; a function for the progress goes along."""
    seen: list[Any] = []
    one = made(tmp_path, on_progress=seen.append)
    copy = sent(one)
    arguments = ("checkpoint", "sinks", "spool", "storage_options", "join_running", "show_values")
    assert [getattr(copy, name) for name in arguments] == [getattr(one, name) for name in arguments]
    assert callable(copy.on_progress)
    assert copy.progress() == one.progress()
    assert copy._lock is not one._lock


def test_an_object_of_a_subclass_keeps_its_own_attributes(tmp_path: Path) -> None:
    one = Own(checkpoint=str(tmp_path), sinks={"folder": FolderSink(str(tmp_path))})
    one.mark = "mine"
    copy = sent(one)
    assert (type(copy).__name__, copy.mark) == ("Own", "mine")


def test_a_server_with_another_version_of_epochsink_refuses_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it unpickles the sinks: fields that only one version has would shift the others."""
    packed = _packed(made(tmp_path))
    monkeypatch.setattr(exactly_once, "__version__", "0.0.1")
    with pytest.raises(ConfigurationError, match=f"has epochsink 0.0.1, and the driver has {epochsink.__version__}"):
        pickle.loads(packed)  # noqa: S301 - its own


@pytest.mark.parametrize("place", ["hdfs://names/checkpoint", "viewfs://m/checkpoint", "dbfs:/checkpoint"])
def test_what_only_the_jvm_can_read_is_refused_by_name(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"through Spark's JVM, which it cannot call") as refused:
        location_of(session(), place)
    assert place in str(refused.value)
    assert "object store" in refused.value.hint


def test_a_place_is_the_same_for_client_and_server() -> None:
    found = [location_of(session(), place) for place in ("/a/b/", "file:///a/b", "file:/a%20b", "s3a://bucket/a/")]
    assert found == ["/a/b", "/a/b", "/a b", "s3a://bucket/a"]
    with pytest.raises(ConfigurationError, match="relative path"):
        location_of(session(), "a/b")


def test_an_object_store_is_reached_by_the_sessions_settings() -> None:
    """Those for Hadoop at the server's start have a prefix, those of the session have none."""
    given = session(spark__hadoop__fs__s3a__access__key="one", fs__s3a__endpoint__region="two")
    place = place_of(given, "s3a://bucket/a", {"endpoint": "http://127.0.0.1:1"}, None)
    assert '"access_key_id": "one"' in place.options
    assert '"region": "two"' in place.options
    assert '"endpoint": "http://127.0.0.1:1"' in place.options
    assert (place.spool.root, place.spool.options) == ("s3a://bucket/a/epochsink/spool", place.options)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is not a folder"):
        place_of(session(), str(tmp_path / "file"), {}, None).open()


@pytest.mark.parametrize(
    ("offsets", "commits", "called", "own"),
    [
        ([0], [], 0, 0),
        ([0, 1], [0], 1, 1),
        ([0], [], 1, 0),  # another query's number
        ([0, 1], [0, 1], 1, None),  # the commit is there already: of another query
        ([0, 1], [0, 1], 2, None),  # nothing has begun
        ([3], [], 3, None),  # the epoch before is not decided
        ([7], [6], 7, 7),  # those before are purged
        ([], [], 0, None),
    ],
)
def test_a_call_must_be_that_of_the_batch_under_way(
    tmp_path: Path, offsets: list[int], commits: list[int], called: int, own: int | None
) -> None:
    for folder, numbers in (("offsets", offsets), ("commits", commits)):
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / str(number)).write_text("v1\n{}")
    execution = ConnectExecution(session(), "q", Checkpoint(LocalStorage(tmp_path)), str(tmp_path))
    assert execution.batch(called) == own
    assert "the checkpoint that it was given" in str(execution.wrong_number(called, own))


@pytest.mark.parametrize(
    ("running", "by_start", "refused"), [(["another"], False, True), (["another"], True, False), ([], False, False)]
)
def test_the_checkpoint_of_a_query_that_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, running: list[str], by_start: bool, refused: bool
) -> None:
    """For a query by hand, in a session that lists its queries."""
    given = session()
    monkeypatch.setattr(given, "active", running, raising=False)
    monkeypatch.setattr(execution, "_client_session", ["client"] if by_start else [])
    made_so = ConnectExecution(given, "q", Checkpoint(LocalStorage(tmp_path)), str(tmp_path))
    with pytest.raises(ConfigurationError, match="query q, which does not run") if refused else nullcontext():
        made_so.refuse_unlike(str(tmp_path), str(tmp_path))


USERS = """
from epochsink.spark.connect.execution import end_if_caught

def fails():
    end_if_caught()
    raise ValueError("of the epoch")

def passes_on():
    try:
        fails()
    except ValueError:
        text = "logged"
        raise

def catches():
    try:
        fails()
    except ValueError:
        pass

"""
LOOP = """
import sys
sys.path[:0] = {path!r}
import users

def process(function):
    function()
    print("decided")

try:
    process(users.{function})
except Exception as error:
    print("told", error)
"""


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [("fails", 0, "told of the epoch"), ("passes_on", 0, "told of the epoch"), ("catches", 70, "")],
)
def test_an_error_that_the_users_function_catches_ends_the_process_before_spark_can_decide(
    tmp_path: Path, function: str, code: int, says: str
) -> None:
    """An error that comes to Spark's loop, even by way of an except, does not."""
    loop = tmp_path / "foreach_batch_worker.py"
    (tmp_path / "users.py").write_text(USERS)
    loop.write_text(LOOP.format(path=sys.path, function=function))
    done = subprocess.run([sys.executable, str(loop)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (code, says), done.stderr


class Commits:
    """An epoch that one caller commits when it may; another one meanwhile sees that the checkpoint is taken over."""

    def __init__(self) -> None:
        self.pending: tuple[int, ...] = (7,)
        self.taken = threading.Event()
        self.may_commit = threading.Event()

    def settle(self, *, ended: bool) -> tuple[tuple[int, ...], str]:
        assert ended
        if self.taken.is_set():
            return self.pending, ""
        self.taken.set()
        assert self.may_commit.wait(30)
        self.pending = ()
        return self.pending, ""


def test_what_a_query_does_not_know_is_said_with_a_command_that_can_be_typed(tmp_path: Path) -> None:
    kit = CheckpointKit(tmp_path / "my checkpoint", {"folder": FolderSink(str(tmp_path / "folder"))})
    started = StreamingQuery(cast("Any", None), "id", "run")
    query = ConnectQuery(cast("Any", None), started, Commits(), Addresses(str(kit.root)))
    with pytest.raises(UnsupportedQuery) as refused:
        _ = query.sinkProgress
    (words,) = commands_in(refused.value, ["spark/connect/query_handle.py sinkProgress: status"])
    type_words(words)
    kit.close()


def test_who_awaits_the_end_returns_after_the_commits_of_who_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program that ends with `awaitTermination` ends the task that commits, in the middle of an epoch."""
    for name in ("stop", "awaitTermination"):
        monkeypatch.setattr(StreamingQuery, name, lambda _self, _timeout=None: None)
    commits, seen = Commits(), list[tuple[int, ...]]()
    query = ConnectQuery(cast("Any", None), StreamingQuery(cast("Any", None), "id", "run"), commits, Addresses())

    def await_end() -> None:
        query.awaitTermination()
        seen.append(commits.pending)

    stopping, waiting = threading.Thread(target=query.stop), threading.Thread(target=await_end)
    stopping.start()
    assert commits.taken.wait(30)
    waiting.start()
    waiting.join(0.2)  # it would return at once
    commits.may_commit.set()
    for thread in (stopping, waiting):
        thread.join(30)
    assert seen == [()]


def test_how_the_commits_stand_crosses_as_text() -> None:
    standing = Standing((3, 4), "Fenced: another driver")
    assert Standing.from_json(standing.to_json()) == standing


@pytest.mark.parametrize(
    ("client", "set_so", "limit"),
    [
        ("the client's", "12345", 12345),
        ("the client's", "12345b", 12345),
        ("the client's", "64MB", 64 << 20),
        ("the client's", "1g", 1 << 30),
        ("the client's", "-1", 0),
        ("the run's", "64MB", 0),
    ],
)
def test_the_limit_of_batches_is_lifted_only_in_a_session_of_the_run_alone(
    client: str, set_so: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 4.3 on foreachBatch has a session of its own; before, the client's other queries have it too."""
    monkeypatch.setattr(execution, "_client_session", [])
    own = session(spark__sql__execution__arrow__maxBytesPerBatch=set_so)
    own.__dict__["session_id"] = "the run's"
    assert CONNECT.byte_limit_of_batches(own) == 0
    called: list[int] = []
    Started(lambda _, epoch: called.append(epoch), client, "start")(cast("Any", None), 7)
    assert called == [7]
    assert CONNECT.byte_limit_of_batches(own) == limit
