"""What is read of a checkpoint's logs is what this PySpark writes there, in every format that it has."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyspark
import pytest

from epochsink import UnsupportedQuery, WentBack
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame
    from streams import Stream

_VERSION: Final = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
_EVOLUTION: Final = "spark.sql.streaming.queryEvolution"
FORMATS: Final[dict[str, dict[str, str]]] = {
    "v1": {},
    **({"v2": {"spark.sql.streaming.offsetLog.formatVersion": "2"}} if _VERSION >= (4, 2) else {}),
    **({"named": {f"{_EVOLUTION}.enableSourceEvolution": "true"}} if _VERSION >= (4, 2) else {}),
}
"""The settings that make the formats, by name; "named" is version 2 with the name of the source, but in 4.2.0."""


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest, stream: Stream) -> Iterator[str]:
    """Let Spark write a format."""
    for name, value in FORMATS[request.param].items():
        stream.spark.conf.set(name, value)
    yield request.param
    for name in FORMATS[request.param]:
        stream.spark.conf.unset(name)


def frame_of(stream: Stream, form: str) -> DataFrame:
    reader: Any = stream.spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
    named = reader.name("orders") if form == "named" else reader
    frame: DataFrame = named.json(str(stream.input))
    return frame


def run(stream: Stream, form: str) -> None:
    stream.run(frame=frame_of(stream, form))


@contextmanager
def spark_is_set_back(stream: Stream) -> Iterator[None]:
    """After the body, put back Spark's own folders as they were: a restore that did not know of the ledger's."""
    copy = stream.folder / "copy"
    shutil.copytree(stream.checkpoint, copy, ignore=shutil.ignore_patterns("epochsink"))
    yield
    for folder in copy.iterdir():
        if folder.is_dir():
            shutil.rmtree(stream.checkpoint / folder.name)
            folder.rename(stream.checkpoint / folder.name)


def test_other_files_behind_the_same_offset_are_refused(stream: Stream, form: str) -> None:
    """The offset of a file source is the number of an entry in its own log, which the checkpoint has too."""
    stream.put([0])
    run(stream, form)
    with spark_is_set_back(stream):
        stream.put([1])
        run(stream, form)
    (stream.input / "000001.json").unlink()
    stream.put([2])
    with pytest.raises(WentBack, match="epoch 1 is recorded with other offsets"):
        run(stream, form)
    assert stream.sink.values() == [0, 1]


def test_the_same_files_are_the_same_input(stream: Stream, form: str) -> None:
    stream.put([0])
    run(stream, form)
    with spark_is_set_back(stream):
        stream.put([1])
        run(stream, form)
    stream.put([2])
    run(stream, form)
    assert stream.sink.values() == [0, 1, 2]


def test_the_files_of_each_epoch_are_found_in_the_log_of_the_source(stream: Stream, form: str) -> None:
    """Also of those that Spark has put into one file with all before them."""
    for number in range(12):
        stream.put([number])
    run(stream, form)
    folder = "orders" if form == "named" else "0"
    assert (stream.checkpoint / "sources" / folder / "9.compact").exists()
    if form != "named":
        assert (stream.checkpoint / "offsets" / "11").read_text().startswith(f"{form}\n")
    checkpoint = Checkpoint(LocalStorage(stream.checkpoint))
    for number in range(12):
        before = checkpoint.offsets_digest(number)
        for log in (stream.checkpoint / "sources" / folder).glob("[0-9]*"):
            log.write_text(log.read_text().replace(f"{number:06}.json", "other.json"))
        assert checkpoint.offsets_digest(number) != before, number


@pytest.mark.parametrize(
    ("log", "kind"), [("offsets", "offset log"), ("commits", "commit log"), ("sources/0", "log of")]
)
def test_a_later_version_of_a_log_is_refused_at_the_start(stream: Stream, log: str, kind: str) -> None:
    stream.put([0])
    stream.run()
    entry = stream.checkpoint / log / "0"
    entry.write_text(entry.read_text().replace("v1", "v9", 1))
    (entry.parent / ".0.crc").unlink()
    with pytest.raises(UnsupportedQuery, match=rf"{log}/0 of the checkpoint has version 9 of Spark's {kind}"):
        stream.run()
