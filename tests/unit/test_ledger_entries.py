"""Entries are read back as they were written; those of another version are refused."""

from __future__ import annotations

import json

import pytest

from epochsink.protocol import ledger_entries
from epochsink.protocol.ledger_entries import (
    Abandoned,
    Done,
    Entry,
    Prepared,
    Replay,
    Resolved,
    Share,
    Skipped,
    Stamp,
    Take,
    decode,
    encode,
    stamped,
)
from epochsink.sink import LastDone, SpoolFile

SHARE = Share(({"gid": "g"},), ("a" * 32,), {"a" * 32: SpoolFile(3, 99, 7)})
ENTRIES: list[Entry] = [
    Take(2, "d" * 32, "query", {"out": {"base": 5}}, 4, {"out": LastDone(3, "b" * 32, ({"gid": "f"},))}),
    Prepared(5, "b" * 32, "digest", {"out": SHARE}),
    Replay(5, ("out",), ({"gid": "h"},)),
    Resolved(5, "out", "discard"),
    Done(5),
    Skipped(6),
    Abandoned((7, 8)),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_an_entry_is_read_back_as_it_was_written(entry: Entry) -> None:
    written = stamped(entry, "app-1")
    found = decode(encode(written))
    assert found == entry
    assert found.stamp == written.stamp
    assert encode(found) == encode(written)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_another_version_is_refused(entry: Entry) -> None:
    content = json.loads(encode(entry))
    content["version"] = ledger_entries.VERSION + 1
    with pytest.raises(ValueError, match=f"version {ledger_entries.VERSION + 1}"):
        decode(json.dumps(content).encode())


def test_a_stamp_says_who_and_since_when() -> None:
    assert str(Stamp(0.0, "host-1", 42, "app-7")) == (
        "1970-01-01 00:00:00 UTC, process 42 on host host-1, Spark application app-7"
    )


def test_a_sink_without_rows_has_no_parts_and_is_never_the_last_done() -> None:
    prepared = Prepared(5, "b" * 32, "digest", {"out": SHARE})
    assert prepared.parts_of("other") == ()
    assert prepared.share_done("other") is None
    assert prepared.share_done("out") == LastDone(5, "b" * 32, SHARE.parts)
