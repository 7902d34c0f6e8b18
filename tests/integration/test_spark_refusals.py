"""Bad input: each refused before any row moves, by an error that names the value, the rule and the hint."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from folder_sink import FolderSink
from pyspark.errors import PySparkException, StreamingQueryException

import epochsink
from epochsink import ExactlyOnce
from epochsink.errors import CheckFailed, ConfigurationError, EpochsinkError, UnsupportedQuery
from epochsink.spark.classic import executors

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from streams import Stream

pytestmark = pytest.mark.connect

SINK = FolderSink("/nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": ""}, "checkpoint='' is not the path"),
        ({"checkpoint": None}, "checkpoint=None is not the path"),
        ({"sinks": {}}, "sinks={} is empty"),
        ({"sinks": {"": SINK}}, "the name ''"),
        ({"sinks": {7: SINK}}, "the name 7"),
        ({"sinks": {"table": "postgresql://"}}, r"sinks\['table'\] is a str, which is not a sink"),
        ({"sinks": {"table": FolderSink}}, r"sinks\['table'\] is the class FolderSink, not an object of it"),
        ({"sinks": [SINK]}, "sinks= got a list, and takes a dict"),
        ({"sinks": SINK}, "sinks= got a FolderSink, and takes a dict"),
        ({"sinks": None}, "sinks= got a NoneType, and takes a dict"),
        ({"spool": 5}, "invalid spool=5"),
        ({"join_running": "no"}, "invalid join_running='no'"),
        ({"sink": SINK}, r"ExactlyOnce\(sink=...\): there is no such argument"),
        ({"checkpointLocation": "/there"}, r"ExactlyOnce\(checkpointLocation=...\)"),
        ({"spool": "spool"}, "spool='spool' is a relative path"),
    ],
)
def test_options_are_checked_when_the_object_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        ExactlyOnce(**{"checkpoint": "/tmp/checkpoint", "sinks": {"folder": SINK}, **options})  # noqa: S108 - not used
    assert refused.value.hint


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda frame: frame, r"start\(\) got a DataFrame, and takes a stream writer"),
        (lambda frame: frame.writeStream.start, r"start\(\) got a method"),
        (lambda _: ExactlyOnce, r"start\(\) got the class ExactlyOnce"),
        (lambda frame: frame.writeStream.format("kafka"), r"already has .format\('kafka'\)"),
        (lambda frame: frame.writeStream.foreachBatch(print), r"already has a function for .foreachBatch"),
        (lambda frame: frame.writeStream.foreach(print), r"already has a function for .foreach\("),
        (lambda frame: frame.writeStream.option("checkpointLocation", "/elsewhere"), "checkpointLocation='/elsewhere'"),
        (lambda frame: frame.groupBy("id").count().writeStream.outputMode("complete"), "sink 'folder' appends rows"),
    ],
)
def test_what_start_would_override_or_cannot_take_is_refused(
    stream: Stream, mistake: Callable[[DataFrame], Any], message: str
) -> None:
    """Nothing has been made by then, and the hint says what to write instead."""
    with pytest.raises(ConfigurationError, match=message) as refused:
        stream.exactly_once().start(mistake(stream.frame()))
    assert refused.value.hint
    assert not stream.checkpoint.exists()


def test_a_writer_may_name_the_same_checkpoint_and_be_started_again(stream: Stream) -> None:
    """As in a loop that starts the query again after a failure."""
    once = stream.exactly_once()
    writer = stream.frame().writeStream.trigger(availableNow=True)
    writer = writer.option("checkpointLocation", stream.checkpoint.as_uri())
    for first in (0, 10):
        stream.put(range(first, first + 10))
        once.start(writer).awaitTermination()
    assert stream.sink.values() == list(range(20))
    with pytest.raises(ConfigurationError, match="already has a function for"):
        stream.exactly_once().start(writer)


@pytest.mark.classic("on Spark Connect the output mode of a query by hand is not known")
def test_complete_results_into_a_sink_that_appends_are_refused_by_hand_too(stream: Stream) -> None:
    stream.put(range(10))
    once = stream.exactly_once()
    writer = stream.frame().groupBy("id").count().writeStream.foreachBatch(once).outputMode("complete")
    query = writer.option("checkpointLocation", once.checkpoint).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="sink 'folder' appends rows"):
        query.awaitTermination()
    assert stream.sink.rows() == []


def test_a_place_that_does_not_follow_from_the_key_is_refused_by_hand_too(stream: Stream) -> None:
    class Placed(FolderSink):
        def placement(self, schema: pa.Schema) -> tuple[dict[str, str], list[str]]:
            assert schema.names
            return {"routing": "word"}, ["id"]

    stream.put(range(10))
    once = stream.exactly_once({"folder": Placed(stream.sink.folder)})
    writer = stream.frame().writeStream.foreachBatch(once)
    query = writer.option("checkpointLocation", once.checkpoint).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="routing='word' depends on word, and the key does not"):
        query.awaitTermination()
    assert stream.sink.rows() == []


def test_complete_results_into_a_sink_with_a_key_replace_those_before(stream: Stream) -> None:
    class Keyed(FolderSink):
        key = ("id",)

    sink = Keyed(stream.sink.folder)
    for first in (0, 5):
        stream.put(range(first, first + 10))
    stream.run(stream.exactly_once({"folder": sink}), stream.frame().groupBy("id").count(), mode="complete")
    assert [row["epoch"] for row in sink.rows()] == [0] * 10 + [1] * 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"select": ["nope"]}, "nope"),
        ({"select": ["id id id"]}, "id id id"),
        ({"where": "nope > 1"}, "nope"),
        ({"where": "id +"}, "id +"),
        ({"where": "word || 'x'"}, "where"),
        ({"delete_when": "nope"}, "nope"),
        ({"distribute_by": ["nope"]}, "nope"),
        ({"select": ["id", "word AS id"]}, "column name"),
        ({"select": ["*", "id"]}, "column name"),
    ],
)
def test_bad_sql_names_its_sink(stream: Stream, change: dict[str, Any], message: str) -> None:
    sinks: Any = {"good": stream.sink, "bad": replace(stream.sink, **change)}
    stream.put(range(10))
    with pytest.raises(ConfigurationError, match="sink 'bad'") as refused:
        stream.run(stream.exactly_once(sinks))
    assert message in str(refused.value)
    assert refused.value.hint
    assert not stream.checkpoint.exists()


def test_every_finding_of_every_sink_comes_in_one_error(stream: Stream) -> None:
    sinks: Any = {
        "one": replace(stream.sink, findings=["table x does not exist: create it", "no key"]),
        "two": replace(stream.sink, select=["id"], findings=["topic y does not exist"]),
    }
    with pytest.raises(CheckFailed) as refused:
        stream.run(stream.exactly_once(sinks))
    assert refused.value.facts["findings"] == [
        "sink 'one': table x does not exist: create it (columns id, word, at)",
        "sink 'one': no key (columns id, word, at)",
        "sink 'two': topic y does not exist (columns id)",
    ]
    assert not stream.checkpoint.exists()


def test_sinks_that_want_rows_spread_in_different_ways_are_refused(stream: Stream) -> None:
    sinks: Any = {
        "one": replace(stream.sink, distribute_by=["id"]),
        "two": replace(stream.sink, distribute_by=["word"]),
    }
    with pytest.raises(ConfigurationError, match="'one' by id; 'two' by word"):
        stream.run(stream.exactly_once(sinks))


def test_a_shuffle_for_one_sink_beside_one_that_keeps_the_order_is_refused(stream: Stream) -> None:
    sinks: Any = {
        "spread": replace(stream.sink, distribute_by=["id"]),
        "free": stream.sink,
        "ordered": replace(stream.sink, keeps_order=True),
    }
    with pytest.raises(ConfigurationError, match=r"sink 'ordered' keeps the order .* sink 'spread' needs a shuffle"):
        stream.run(stream.exactly_once(sinks))
    assert not stream.checkpoint.exists()


@pytest.mark.parametrize("place", ["nosuch://host/folder", "nosuch:/folder", "not a: uri"])
def test_a_checkpoint_that_spark_has_no_file_system_for_is_refused(stream: Stream, place: str) -> None:
    once = ExactlyOnce(checkpoint=place, sinks={"folder": stream.sink})
    with pytest.raises(ConfigurationError, match=r"cannot be used|through Spark's JVM|a relative path") as refused:
        stream.start(once)
    assert place in str(refused.value)
    assert refused.value.hint


def test_a_checkpoint_that_is_a_file_is_refused(stream: Stream) -> None:
    stream.checkpoint.write_text("not a folder")
    with pytest.raises(ConfigurationError, match=r"is a file|is not a folder"):
        stream.run()


def test_a_checkpoint_that_cannot_be_made_is_refused(stream: Stream) -> None:
    once = ExactlyOnce(checkpoint="/proc/epochsink/checkpoint", sinks={"folder": stream.sink})
    with pytest.raises(ConfigurationError, match=r"checkpoint='/proc/epochsink/checkpoint'.*(No such file|mkdir)"):
        stream.start(once)


def test_a_damaged_metadata_file_is_refused(stream: Stream) -> None:
    stream.put(range(10))
    stream.run()
    (stream.checkpoint / "metadata").write_text("{")
    with pytest.raises(EpochsinkError, match="the file 'metadata' of the checkpoint"):
        stream.run()


def test_another_checkpoint_by_hand_is_refused(stream: Stream, tmp_path: Path) -> None:
    """Also a copy of the right one, which has the same query id, and after `recover`."""
    stream.put(range(10))
    stream.run()
    stream.put(range(10, 20))
    shutil.copytree(stream.checkpoint, tmp_path / "copy")
    once = stream.exactly_once()
    once.recover(stream.spark)
    stream.checkpoint = tmp_path / "copy"
    with pytest.raises(StreamingQueryException, match=r"(ExactlyOnce|it) was given"):
        stream.by_hand(once).awaitTermination()
    assert stream.sink.values() == list(range(10))


def test_a_call_outside_of_a_query_is_refused(stream: Stream) -> None:
    with pytest.raises(UnsupportedQuery, match="outside the foreachBatch of a running streaming query"):
        stream.exactly_once()(stream.spark.range(3).toDF("id"), 0)


def test_async_progress_tracking_is_refused(stream: Stream) -> None:
    """Spark's own check is bypassed by an undocumented option: then offsets may change between runs."""
    source = stream.spark.readStream.format("rate").load().selectExpr("value AS id")
    writer = (
        source.writeStream.option("asyncProgressTrackingEnabled", "true")
        .option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
        .trigger(processingTime="20 milliseconds")
    )
    with pytest.raises(UnsupportedQuery, match=r"(?i)async ?progress ?tracking"):
        stream.exactly_once().start(writer)
    assert stream.spark.streams.active == []
    assert stream.sink.rows() == []


@pytest.mark.classic("on Spark Connect the options of a query by hand are not known")
def test_async_progress_tracking_by_hand_is_refused(stream: Stream) -> None:
    source = stream.spark.readStream.format("rate").load().selectExpr("value AS id")
    once = stream.exactly_once()
    query = (
        source.writeStream.foreachBatch(once)
        .option("asyncProgressTrackingEnabled", "true")
        .option("_asyncProgressTrackingOverrideSinkSupportCheck", "true")
        .option("checkpointLocation", once.checkpoint)
        .trigger(processingTime="20 milliseconds")
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"(?i)async ?progress ?tracking"):
        query.awaitTermination()
    assert stream.sink.rows() == []


def test_continuous_mode_is_refused_by_spark(stream: Stream) -> None:
    source = stream.spark.readStream.format("rate").load().selectExpr("value AS id")
    with pytest.raises(PySparkException, match=r"(?i)continuous"):
        stream.exactly_once().start(source.writeStream.trigger(continuous="1 second"))


def test_types_without_an_arrow_name_are_refused(stream: Stream) -> None:
    sink = replace(stream.sink, select=["id", "INTERVAL '1' YEAR AS v"])
    with pytest.raises(ConfigurationError, match="sink 'folder'"):
        stream.run(stream.exactly_once({"folder": sink}))


BARE_PYTHON = """#!/bin/sh
PYTHONPATH={folder}:$PYTHONPATH exec {python} "$@"
"""
LACKS_EPOCHSINK = """
import sys

class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "epochsink":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Lacks())
"""


@pytest.mark.classic("changes the Python of the executors")
def test_executors_without_epochsink_are_refused_before_the_first_row(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, and with the Python that lacks it."""
    python = tmp_path / "python"
    python.write_text(BARE_PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(LACKS_EPOCHSINK)
    monkeypatch.setattr(stream.spark.sparkContext, "pythonExec", str(python))
    stream.put(range(10))
    with pytest.raises(
        ConfigurationError, match=r"the executors' Python .* lacks epochsink, so that no task could write"
    ):
        stream.run()
    assert not stream.checkpoint.exists()


@pytest.mark.classic("changes the Python of the executors")
def test_executors_without_that_python_are_refused(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream.spark.sparkContext, "pythonExec", "/nowhere/python3")
    with pytest.raises(ConfigurationError, match=r"cannot run Python \(/nowhere/python3\): .*Cannot run program"):
        stream.run()


def with_older_epochsink(stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give executors that join from now on a version of epochsink whose `Identity` begins with one more field."""
    package = tmp_path / "older" / "epochsink"
    shutil.copytree(Path(epochsink.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in [
        ("__init__.py", f'"{epochsink.__version__}"', '"0.0.9"'),
        ("sink/values.py", "    query_id: str\n", "    region: str\n    query_id: str\n"),
    ]:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new, 1))
    # of what only the newer version has, an executor could not even read that it is another version
    (package / "testing" / "local_sink.py").unlink()
    # Python workers are started anew for other variables
    monkeypatch.setitem(stream.spark.sparkContext.environment, "PYTHONPATH", str(package.parent))


@pytest.mark.classic("changes the Python of the executors")
def test_executors_with_another_version_are_refused_before_the_first_row(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_older_epochsink(stream, tmp_path, monkeypatch)
    monkeypatch.setattr(executors, "_checked", set())
    stream.put(range(10))
    with pytest.raises(ConfigurationError, match=r"executors' Python .* has epochsink 0\.0\.9, and the driver has"):
        stream.run()
    assert not stream.checkpoint.exists()


@pytest.mark.classic("changes the Python of the executors")
def test_an_executor_that_joins_later_with_another_version_writes_no_row(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks would read the driver's values by position: a name for a query's id, a query's id for a region."""
    stream.put(range(10))
    stream.run()
    with_older_epochsink(stream, tmp_path, monkeypatch)
    stream.put(range(10, 20))
    with pytest.raises(ConfigurationError, match=r"an executor has epochsink 0\.0\.9, and the driver has"):
        stream.run()
    assert stream.sink.values() == list(range(10))
    monkeypatch.undo()
    stream.run()
    assert stream.sink.values() == list(range(20))
