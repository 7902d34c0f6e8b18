"""The sink of docs/how-to/write-a-sink.md keeps the contract of every sink."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from epochsink.testing import SinkContract, SinkRig
from json_lines_sink import JsonLines


class JsonLinesRig(SinkRig):
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "lines"
        self.folder.mkdir()
        super().__init__(JsonLines(folder=str(self.folder)), folder / "spool")

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"line": [json.dumps({"id": row}) for row in rows]})

    def lose_prepared(self) -> None:
        for path in self.folder.glob(".*"):
            path.unlink()

    def visible(self) -> list[int]:
        files = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        return sorted(json.loads(line)["id"] for path in files for line in path.read_text().splitlines())

    def leftovers(self) -> list[str]:
        return [path.name for path in self.folder.glob(".*")]


class TestJsonLines(SinkContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> JsonLinesRig:
        return JsonLinesRig(tmp_path)
