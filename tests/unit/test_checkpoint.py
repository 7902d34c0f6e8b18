"""What Spark's checkpoint says, read from files in Spark's own formats."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from epochsink.errors import EpochsinkError, UnsupportedQuery
from epochsink.protocol.checkpoint import NOTHING_DECIDED, Checkpoint
from epochsink.protocol.storage import LocalStorage

COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'


def offsets(source: str, *, watermark: int = 0, timestamp: int = 1, version: str = "v1") -> str:
    header = {
        "batchWatermarkMs": watermark,
        "batchTimestampMs": timestamp,
        "conf": {"spark.sql.shuffle.partitions": "2"},
    }
    return f"{version}\n{json.dumps(header)}\n{source}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("commits", "offsets"):
        (tmp_path / folder).mkdir()
    return tmp_path


@pytest.fixture
def checkpoint(root: Path) -> Checkpoint:
    return Checkpoint(LocalStorage(root))


def test_a_fresh_checkpoint_decides_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint(LocalStorage(tmp_path / "not-there"))
    assert checkpoint.query_id() is None
    assert checkpoint.newest_decided() == NOTHING_DECIDED
    assert not checkpoint.has_commit(0)
    assert not checkpoint.is_decided(0)


def test_the_query_id(root: Path, checkpoint: Checkpoint) -> None:
    (root / "metadata").write_text('{"id":"5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"}')
    assert checkpoint.query_id() == "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"


def test_a_commit_decides(root: Path, checkpoint: Checkpoint) -> None:
    (root / "commits" / "7").write_text(COMMIT)
    assert checkpoint.has_commit(7)
    assert checkpoint.is_decided(7)
    assert not checkpoint.is_decided(8)
    assert checkpoint.newest_decided() == 7


def test_purged_epochs_are_decided(root: Path, checkpoint: Checkpoint) -> None:
    """Spark deletes the oldest commits; whatever is older than all that stand was decided."""
    for epoch in (40, 41, 42):
        (root / "commits" / str(epoch)).write_text(COMMIT)
    assert checkpoint.is_decided(3)
    assert not checkpoint.has_commit(3)
    assert checkpoint.newest_decided() == 42


def test_numbers_are_compared_as_numbers(root: Path, checkpoint: Checkpoint) -> None:
    for epoch in (9, 10):
        (root / "commits" / str(epoch)).write_text(COMMIT)
    assert checkpoint.newest_decided() == 10


def test_other_files_are_ignored(root: Path, checkpoint: Checkpoint) -> None:
    for name in (".3.crc", ".3.0a1b.tmp", "3.compact", "_SUCCESS"):
        (root / "commits" / name).write_text(COMMIT)
    assert checkpoint.newest_decided() == NOTHING_DECIDED
    assert not checkpoint.is_decided(0)


def test_a_torn_commit_decides_nothing(root: Path, checkpoint: Checkpoint) -> None:
    (root / "commits" / "0").touch()
    assert not checkpoint.has_commit(0)
    assert not checkpoint.is_decided(0)


def test_answers_are_read_anew(root: Path, checkpoint: Checkpoint) -> None:
    assert not checkpoint.has_commit(0)
    (root / "commits" / "0").write_text(COMMIT)
    assert checkpoint.has_commit(0)
    (root / "commits" / "0").unlink()
    assert not checkpoint.has_commit(0)


def test_the_digest_is_of_the_input_alone(root: Path, checkpoint: Checkpoint) -> None:
    """The same offsets planned again at another time are the same input; other offsets or a watermark are not."""
    digests = []
    for epoch, text in enumerate(
        [
            offsets('{"topic":{"0":10}}'),
            offsets('{"topic":{"0":10}}', timestamp=2),
            offsets('{"topic":{"0":11}}'),
            offsets('{"topic":{"0":10}}', watermark=5),
            offsets('{"topic":{"0":10}}\n{"other":1}'),
            offsets('{"topic":{"0":10}}\n-'),
        ]
    ):
        (root / "offsets" / str(epoch)).write_text(text)
        digests.append(checkpoint.offsets_digest(epoch))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("text", [None, "", "v1", "v1\nnot json\n{}", "v1\n\udcff".encode("utf-8", "surrogateescape")])
def test_damaged_offsets_are_named(root: Path, checkpoint: Checkpoint, text: str | bytes | None) -> None:
    if text is not None:
        (root / "offsets" / "3").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(EpochsinkError, match="offsets/3"):
        checkpoint.offsets_digest(3)


def log_of_files(root: Path, name: str, *entries: tuple[int, str], source: str = "0") -> None:
    """Write an entry of a file source's log as Spark does: which files it took at which of its offsets."""
    folder = root / "sources" / source
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"path": path, "timestamp": 1, "batchId": number}) for number, path in entries]
    (folder / name).write_text("\n".join(["v1", *lines]))


def test_the_files_that_a_source_took_are_part_of_the_input(root: Path, checkpoint: Checkpoint) -> None:
    """The offset names an entry of the source's log only, and a restored checkpoint may put other files there."""
    (root / "offsets" / "0").write_text(offsets('{"logOffset":9}'))
    log_of_files(root, "9", (9, "file:/b.json"))
    before = checkpoint.offsets_digest(0)
    log_of_files(root, "9", (9, "file:/c.json"))
    assert checkpoint.offsets_digest(0) != before


@pytest.mark.parametrize("source", ["0", "orders"])
def test_the_files_of_a_source_that_has_its_id_in_the_offsets_are_part_of_the_input(
    root: Path, checkpoint: Checkpoint, source: str
) -> None:
    """Version 2 of Spark's offset log: without the id, the offset looked like one of another kind of source."""
    (root / "offsets" / "0").write_text(offsets(f'{source}:{{"logOffset":9}}', version="v2"))
    log_of_files(root, "9", (9, "file:/b.json"), source=source)
    before = checkpoint.offsets_digest(0)
    log_of_files(root, "9", (9, "file:/c.json"), source=source)
    assert checkpoint.offsets_digest(0) != before


def test_the_order_of_named_sources_is_not_part_of_the_input(root: Path, checkpoint: Checkpoint) -> None:
    for epoch, sources in enumerate(['b:{"t":{"0":1}}\na:-', 'a:-\nb:{"t":{"0":1}}', 'a:{"t":{"0":1}}\nb:-']):
        (root / "offsets" / str(epoch)).write_text(offsets(sources, version="v2"))
    digests = [checkpoint.offsets_digest(epoch) for epoch in range(3)]
    assert digests[0] == digests[1]
    assert digests[1] != digests[2]


def test_the_digest_of_the_first_version_stays_what_ledgers_hold(root: Path, checkpoint: Checkpoint) -> None:
    (root / "offsets" / "0").write_text(offsets('{"logOffset":9}\n-'))
    log_of_files(root, "9", (9, "file:/b.json"))
    expected = ["v1", 0, ['{"logOffset":9}', "-"], [["file:/b.json"], []]]
    assert checkpoint.offsets_digest(0) == hashlib.sha256(json.dumps(expected).encode()).hexdigest()


@pytest.mark.parametrize(
    ("log", "text", "told"),
    [
        ("offsets/0", offsets("{}", version="v3"), "version 3 of Spark's offset log, and epochsink knows none after 2"),
        ("commits/0", "v4\n{}", "version 4 of Spark's commit log, and epochsink knows none after 3"),
        ("sources/0/9", "v2\n{}", "version 2 of Spark's log of a file source, and epochsink knows none after 1"),
    ],
)
def test_a_version_that_is_not_known_is_refused_by_name(
    root: Path, checkpoint: Checkpoint, log: str, text: str, told: str
) -> None:
    (root / "offsets" / "0").write_text(offsets('{"logOffset":9}'))
    (root / "commits" / "0").write_text(COMMIT)
    log_of_files(root, "9", (9, "file:/b.json"))
    checkpoint.refuse_unknown_formats()
    (root / log).write_text(text)
    with pytest.raises(UnsupportedQuery, match=told) as refused:
        checkpoint.refuse_unknown_formats()
    assert log in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_a_commit_of_any_known_version_decides(root: Path, checkpoint: Checkpoint, version: str) -> None:
    (root / "commits" / "0").write_text(f'{version}\n{{"nextBatchWatermarkMs":0,"sinkMetadataMap":{{}}}}')
    assert checkpoint.has_commit(0)


def test_a_commit_of_an_unknown_version_decides_nothing(root: Path, checkpoint: Checkpoint) -> None:
    (root / "commits" / "0").write_text("v4\n{}")
    with pytest.raises(UnsupportedQuery, match="commits/0"):
        checkpoint.has_commit(0)


def test_a_damaged_log_of_a_source_is_named(root: Path, checkpoint: Checkpoint) -> None:
    (root / "offsets" / "0").write_text(offsets('{"logOffset":9}'))
    log_of_files(root, "9", (9, "file:/b.json"))
    (root / "sources" / "0" / "9").write_text('v1\n{"path":"file:/b')
    with pytest.raises(EpochsinkError, match="sources/0/9"):
        checkpoint.offsets_digest(0)


@pytest.mark.parametrize("name", ["9", "9.compact"])
@pytest.mark.parametrize("source", ["0", "orders"])
def test_what_is_recorded_of_a_file_source_is_made_durable_with_its_log(
    root: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    """Otherwise Spark lists the folder anew after a power cut, and the same offset means other files."""
    lines = {"0": '{"logOffset":9}\n{"topic":{"0":10}}', "orders": 'orders:{"logOffset":9}\nother:{"topic":{"0":10}}'}
    (root / "offsets" / "0").write_text(offsets(lines[source], version="v1" if source == "0" else "v2"))
    log_of_files(root, name, (9, "file:/b.json"), source=source)
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().relative_to(root).as_posix())
    )
    before = checkpoint.offsets_digest(0)
    assert synced == []
    assert checkpoint.offsets_digest(0, durable=True) == before
    assert set(synced) == {"offsets/0", "offsets", f"sources/{source}/{name}", f"sources/{source}", "sources"}


@pytest.mark.parametrize(("number", "compacted"), [(9, "9.compact"), (8, "9.compact"), (10, "19.compact")])
def test_the_input_is_the_same_after_spark_has_compacted_the_log_of_a_source(
    root: Path, checkpoint: Checkpoint, number: int, compacted: str
) -> None:
    (root / "offsets" / "0").write_text(offsets(f'{{"logOffset":{number}}}'))
    log_of_files(root, str(number), (number, "file:/b.json"))
    before = checkpoint.offsets_digest(0)
    (root / "sources" / "0" / str(number)).unlink()
    log_of_files(root, compacted, (7, "file:/a.json"), (number, "file:/b.json"), (19, "file:/z.json"))
    assert checkpoint.offsets_digest(0) == before
