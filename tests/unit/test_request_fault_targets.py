"""Rows that a plan keeps before it deletes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink_devkit.history.readers.kafka import KafkaReader
from request_faults.families import _KafkaReader

if TYPE_CHECKING:
    import pytest


def test_rows_that_are_kept_twice_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction is committed as they are kept: they are kept once more, and only then deleted."""
    topic = [(0, 0, b"a")]
    monkeypatch.setattr(KafkaReader, "_records", lambda *_: iter(topic))
    reader = _KafkaReader("127.0.0.1:1", "t")
    reader.keep()
    topic.append((1, 0, b"b"))
    reader.keep()
    assert reader.values() == [b"a", b"b"]
    topic.clear()
    assert reader.values() == [b"a", b"b"]
    topic.append((0, 2, b"c"))
    assert reader.values() == [b"a", b"b", b"c"]
