"""The sink of docs/how-to/write-a-sink.md keeps the contract of every sink."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from epochsink.testing import SinkContract, SinkRig

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "json_lines_sink.py"


def example() -> Any:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("json_lines_sink", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class JsonLinesRig(SinkRig):
    """A folder of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "lines"
        self.folder.mkdir()
        super().__init__(example().JsonLines(folder=str(self.folder)), folder / "spool")

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


def test_the_how_to_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-sink.md").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown
    code = EXAMPLE.read_text() + Path(__file__).read_text()
    assert [block for block in shown if block.strip() not in code] == []
