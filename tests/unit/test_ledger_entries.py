"""Entries are read back as they were written; those of another format are refused."""

from __future__ import annotations

import json

import pytest

from epochsink import __version__
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
    Summary,
    Take,
    decode,
    encode,
    stamped,
)
from epochsink.sink import LastDone, SpoolFile

SHARE = Share(({"gid": "g"},), ("a" * 32,), {"a" * 32: SpoolFile(3, 99, 7)})
ENTRIES: list[Entry] = [
    Take(
        *(2, "d" * 32, "query", {"out": {"base": 5}}, 4),
        left={"gone": 3},
        summary=Summary(applied={"out": LastDone(3, "b" * 32, ({"gid": "f"},))}, abandoned=Abandoned((7,))),
    ),
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
def test_another_version_is_refused_by_the_name_of_who_wrote_it(entry: Entry) -> None:
    content = json.loads(encode(stamped(entry, "")))
    assert content["stamp"]["epochsink"] == __version__
    content["version"] = ledger_entries.VERSION + 1
    content["stamp"]["epochsink"] = "9.8.7"
    with pytest.raises(ValueError, match=rf"version {ledger_entries.VERSION + 1}; epochsink 9\.8\.7 wrote it"):
        decode(json.dumps(content).encode())


@pytest.mark.parametrize("stamp", [None, {}])
def test_an_entry_of_which_nobody_says_who_wrote_it_is_refused_as_well(stamp: object) -> None:
    with pytest.raises(ValueError, match="version 0; epochsink of an unknown version wrote it"):
        decode(json.dumps({"entry": "done", "version": 0, "epoch": 1, "stamp": stamp}).encode())


def test_an_unknown_kind_of_entry_is_refused_by_the_name_of_who_wrote_it() -> None:
    content = {"entry": "merged", "version": 1, "epoch": 1, "stamp": {"epochsink": "1.9.0"}}
    with pytest.raises(ValueError, match=r"'merged'; epochsink 1\.9\.0 wrote it"):
        decode(json.dumps(content).encode())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_what_a_newer_version_adds_is_left_out(entry: Entry) -> None:
    """At the top, and in each object below: docs/reference/ledger-format.md promises it for every 1.x."""
    written = stamped(entry, "app-1")

    content = json.loads(encode(written))
    for one in (content, content["stamp"], content.get("summary", {}), *content.get("shares", {}).values()):
        one["since_1_7"] = {"anything": 1}
    for share in content.get("shares", {}).values():
        for file in share["files"].values():
            file["since_1_7"] = 1
    assert encode(decode(json.dumps(content).encode())) == encode(written)


def test_a_take_of_an_older_version_says_of_no_sink_that_it_has_left() -> None:
    content = json.loads(encode(ENTRIES[0]))
    del content["left"]
    take = decode(json.dumps(content).encode())
    assert isinstance(take, Take)
    assert take.left == {}


def test_a_take_without_a_summary_is_refused() -> None:
    """To go on without it would be to forget every epoch before."""
    content = json.loads(encode(ENTRIES[0]))
    for missing in ({**content, "summary": None}, {name: content[name] for name in content if name != "summary"}):
        with pytest.raises(TypeError, match="summary"):
            decode(json.dumps(missing).encode())


def test_a_stamp_says_who_and_since_when() -> None:
    assert str(Stamp(0.0, "host-1", 42, "app-7")) == (
        "1970-01-01 00:00:00 UTC, process 42 on host host-1, Spark application app-7"
    )


def test_a_sink_without_rows_has_no_parts_and_is_never_the_last_done() -> None:
    prepared = Prepared(5, "b" * 32, "digest", {"out": SHARE})
    assert prepared.parts_of("other") == ()
    with pytest.raises(KeyError, match="other"):
        prepared.share_done("other")
    assert prepared.share_done("out") == LastDone(5, "b" * 32, SHARE.parts)


def test_sinks_that_commit_as_one_share_their_parts_and_the_others_do_not() -> None:
    prepared = Prepared(5, "b" * 32, "digest", {"out": SHARE}, (("out", "too"), ("a", "b")))
    assert prepared.sharers("too") == ("out", "too")
    assert prepared.sharers("b") == ("a", "b")
    assert prepared.sharers("alone") == ("alone",)
