"""Checkpoints that each supported PySpark has written, in each format that it can write, say what they should.

`tests/support/spark_samples.py` has made them. Of twelve epochs Spark has kept the logs of the last three.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from epochsink import UnsupportedQuery
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.spark_logs import COMMITS, FILES, OFFSETS
from epochsink.protocol.storage import LocalStorage

SAMPLES: Final = {
    f"{file.stem}, {form}": sample
    for file in sorted(Path(__file__).with_name("spark_checkpoints").glob("*.json"))
    for form, sample in json.loads(file.read_text()).items()
}
NEWEST: Final = 11
OFFSETS_OF: Final = {"offset log of version 2": "v2", "4.2.0, named source": "v1", "named source": "v2"}
COMMITS_OF: Final = {"state checkpoints of format 2": "v2", "named sink": "v3"}
"""The version of each log by form, or by sample; v1 if it is not here."""


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def root(sample: str, tmp_path: Path) -> Path:
    for name, content in SAMPLES[sample].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.fixture
def checkpoint(root: Path) -> Checkpoint:
    return Checkpoint(LocalStorage(root))


def test_there_is_a_sample_of_each_supported_version_and_of_each_format() -> None:
    assert {name.rpartition(".")[0] for name in SAMPLES} == {"4.0", "4.1", "4.2", "4.3"}
    first_lines = {
        (name.partition("/")[0], content.partition("\n")[0])
        for files in SAMPLES.values()
        for name, content in files.items()
    }
    for log, folder in ((OFFSETS, "offsets"), (COMMITS, "commits"), (FILES, "sources")):
        assert {(folder, f"v{version}") for version in range(1, log.newest_known + 1)} <= first_lines


def test_the_logs_have_the_versions_that_the_form_is_named_for(sample: str, root: Path) -> None:
    form = sample.partition(", ")[2]
    for folder, versions in (("offsets", OFFSETS_OF), ("commits", COMMITS_OF)):
        version = versions.get(sample) or versions.get(form, "v1")
        assert (root / folder / str(NEWEST)).read_text().startswith(f"{version}\n")
    assert (root / "sources" / ("orders" if form == "named source" else "0") / "9.compact").exists()


def test_what_is_begun_and_decided(sample: str, checkpoint: Checkpoint) -> None:
    checkpoint.refuse_unknown_formats()
    assert checkpoint.query_id() == json.loads(SAMPLES[sample]["metadata"])["id"]
    assert (checkpoint.newest_begun(), checkpoint.newest_decided()) == (NEWEST, NEWEST)
    assert [checkpoint.is_decided(epoch) for epoch in (0, 8, 9, NEWEST, NEWEST + 1)] == [True, True, True, True, False]
    assert not checkpoint.is_under_way(NEWEST)
    assert checkpoint.has_offsets(NEWEST)
    assert not checkpoint.has_offsets(0)
    begun = checkpoint.begun_at(NEWEST)
    # in the days of November 2026 in which the samples were made
    assert begun is not None
    assert 1_793_500_000 < begun < 1_796_200_000


def test_an_epoch_is_under_way_without_its_commit(root: Path, checkpoint: Checkpoint) -> None:
    (root / "commits" / str(NEWEST)).unlink()
    assert checkpoint.is_under_way(NEWEST)
    assert checkpoint.newest_decided() == NEWEST - 1


def test_the_source_of_an_epoch_is_quoted(sample: str, checkpoint: Checkpoint) -> None:
    named = {"offset log of version 2": "0:", "named source": "orders:"}.get(sample.partition(", ")[2], "")
    named = "" if sample.startswith("4.2.0, named") else named
    told = f'{named}{{"logOffset":{NEWEST - 1}}} to {named}{{"logOffset":{NEWEST}}}'
    assert checkpoint.source_of(NEWEST) == told


def test_the_digest_is_that_of_the_files_of_the_epoch_and_its_watermark(root: Path, checkpoint: Checkpoint) -> None:
    """Also of the one whose entry Spark has put into one file with those before it; not of when it was planned."""
    (log,) = (root / "sources").iterdir()
    for epoch, entry in ((9, "9.compact"), (NEWEST, str(NEWEST))):
        digest = checkpoint.offsets_digest(epoch)
        offsets, listed = root / "offsets" / str(epoch), log / entry
        begun = checkpoint.begun_at(epoch)
        assert begun is not None
        kept = offsets.read_text()
        offsets.write_text(kept.replace(f'"batchTimestampMs":{begun * 1000:.0f}', '"batchTimestampMs":1'))
        assert checkpoint.begun_at(epoch) == 0.001
        assert checkpoint.offsets_digest(epoch) == digest
        offsets.write_text(kept.replace('"batchWatermarkMs":0', '"batchWatermarkMs":1'))
        assert checkpoint.offsets_digest(epoch) != digest
        offsets.write_text(kept)
        listed.write_text(listed.read_text().replace(".json", ".other"))
        assert checkpoint.offsets_digest(epoch) != digest


@pytest.mark.parametrize(("folder", "log"), [("offsets", OFFSETS), ("commits", COMMITS)])
def test_the_next_version_of_a_log_is_refused_by_name_at_the_start(
    root: Path, checkpoint: Checkpoint, folder: str, log: object
) -> None:
    entry = root / folder / str(NEWEST)
    newest = OFFSETS.newest_known if log is OFFSETS else COMMITS.newest_known
    entry.write_text(f"v{newest + 1}\n" + entry.read_text().partition("\n")[2])
    with pytest.raises(UnsupportedQuery, match=rf"{folder}/{NEWEST} of the checkpoint has version {newest + 1} of"):
        checkpoint.refuse_unknown_formats()


def test_several_named_sources_in_a_log_without_their_names_are_refused(tmp_path: Path) -> None:
    """PySpark 4.2.0 writes it so: which of them an offset is of, nothing says."""
    for name, content in SAMPLES["4.2.0, named source"].items():
        for copy in (name, name.replace("orders", "returns")):
            (tmp_path / copy).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / copy).write_text(content)
    with pytest.raises(UnsupportedQuery, match="which of the sources orders, returns an offset is of"):
        Checkpoint(LocalStorage(tmp_path)).refuse_unknown_formats()
