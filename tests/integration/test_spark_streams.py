"""What a running query shows: when rows become visible, and what stop, drain and restart leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from streams import Stream


def test_all_rows_are_visible_when_await_termination_returns(stream: Stream) -> None:
    """availableNow: the last epoch too, whose commits/N Spark writes just before the query ends."""
    for first in (0, 10, 20):
        stream.put(range(first, first + 10))
    stream.run()
    assert stream.sink.values() == list(range(30))
    assert stream.committed() == stream.done() == [0, 1, 2]
    assert stream.sink.prepared() == []
    assert list((stream.checkpoint / "epochsink" / "spool").glob("*/*")) == []
