"""The sink of docs/how-to/write-a-sink.md in a query on real Spark."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from streams import Stream

EXAMPLE = Path(__file__).parents[2] / "examples" / "json_lines_sink.py"


def test_a_sink_of_ones_own_takes_at_most_85_lines() -> None:
    """SinkContract holds it to the contract in tests/contract."""
    assert len(EXAMPLE.read_text().splitlines()) <= 85


def test_a_sink_of_ones_own_gets_every_row_once_across_runs(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks import its module as those of any user's: it is added to the session."""
    stream.spark.sparkContext.addPyFile(str(EXAMPLE))
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    sink = importlib.import_module("json_lines_sink").JsonLines(folder=str(stream.folder / "lines"))
    Path(sink.folder).mkdir()
    for ids in (range(4), range(4, 6)):
        stream.put(ids)
        stream.run(stream.exactly_once({"lines": sink}))
    files = [path for path in Path(sink.folder).iterdir() if not path.name.startswith(".")]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == [0, 1, 2, 3, 4, 5]
    assert not list(Path(sink.folder).glob(".*"))
