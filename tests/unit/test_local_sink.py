"""The in-memory sink's failure knobs, which work from any process."""

from __future__ import annotations

import pickle
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.protocol.spool import Spool
from epochsink.sink import COMMITTED, Epoch, Identity, Outcome, Rows, Task
from epochsink.testing import LocalSink
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.sink import Committable

WHO = Identity("query-1", "sink", 1)


@pytest.fixture
def sink(tmp_path: Path) -> LocalSink:
    return LocalSink(tmp_path / "sink")


@pytest.fixture
def committer(sink: LocalSink) -> OneSink:
    made = OneSink.of(sink)
    made.open(WHO)
    return made


def write(sink: LocalSink, epoch: Epoch, *ids: int) -> Committable:
    """Write as an executor does, with a sink that was pickled."""
    shipped: LocalSink = pickle.loads(pickle.dumps(sink))  # noqa: S301 - our own bytes
    writer = shipped.writer(Task(WHO, epoch, 0, uuid.uuid4().hex))
    writer.write(pa.RecordBatch.from_pydict({"id": ids}))
    return writer.prepare()


def epoch(number: int = 0) -> Epoch:
    return Epoch(number, uuid.uuid4().hex)


def no_rows(at: Epoch) -> Rows:
    return Spool("/nowhere").rows(WHO, at, [])


def test_rows_by_epoch(sink: LocalSink, committer: OneSink) -> None:
    for number in (0, 1, 10):
        at = epoch(number)
        (part,) = committer.vote(at, [write(sink, at, number)], no_rows(at))
        assert len(sink.prepared()) == 1
        assert committer.commit(at, part, no_rows(at)) == COMMITTED
    assert sink.prepared() == []
    assert sink.rows() == [{"id": 0}, {"id": 1}, {"id": 10}]
    assert sink.epochs() == {0: [{"id": 0}], 1: [{"id": 1}], 10: [{"id": 10}]}


def test_prepare_fails_as_often_as_told(sink: LocalSink) -> None:
    sink.fail_prepare(times=2)
    for _ in range(2):
        with pytest.raises(PrepareFailed, match="fail_prepare"):
            write(sink, epoch(), 1)
    write(sink, epoch(), 1)


def test_a_vote_fails_as_often_as_told(sink: LocalSink, committer: OneSink) -> None:
    at = epoch()
    written = [write(sink, at, 1)]
    sink.fail_vote()
    with pytest.raises(PrepareFailed, match="fail_vote"):
        committer.vote(at, written, no_rows(at))
    assert committer.vote(at, written, no_rows(at))


def test_a_lost_reply_is_a_commit_carried_out(sink: LocalSink, committer: OneSink) -> None:
    at = epoch()
    (part,) = committer.vote(at, [write(sink, at, 1)], no_rows(at))
    sink.lose_reply()
    with pytest.raises(OSError, match="reply"):
        committer.commit(at, part, no_rows(at))
    assert sink.rows() == [{"id": 1}]
    assert committer.commit(at, part, no_rows(at)) == COMMITTED
    assert sink.rows() == [{"id": 1}]


def test_an_outcome_is_forgotten(sink: LocalSink, committer: OneSink) -> None:
    at = epoch()
    (part,) = committer.vote(at, [write(sink, at, 1)], no_rows(at))
    sink.forget_outcome()
    assert committer.commit(at, part, no_rows(at)).outcome is Outcome.UNKNOWN
    assert sink.rows() == []
    assert committer.commit(at, part, no_rows(at)) == COMMITTED


def test_what_is_prepared_is_aborted_behind_the_back(sink: LocalSink, committer: OneSink) -> None:
    at = epoch()
    (part,) = committer.vote(at, [write(sink, at, 1)], no_rows(at))
    assert sink.abort_prepared() == [part["name"]]
    assert committer.commit(at, part, no_rows(at)).outcome is Outcome.ABORTED


def test_rows_are_rejected_until_all_are_accepted(sink: LocalSink) -> None:
    sink.reject("id", 7)
    write(sink, epoch(), 6, 8)
    with pytest.raises(RowsRejected, match="id=7"):
        write(sink, epoch(), 6, 7)
    sink.accept_all()
    write(sink, epoch(), 6, 7)


def test_two_attempts_at_one_epoch_show_one(sink: LocalSink, committer: OneSink) -> None:
    first, second = epoch(), epoch()
    parts = [committer.vote(at, [write(sink, at, 1)], no_rows(at))[0] for at in (first, second)]
    assert committer.commit(first, parts[0], no_rows(first)) == COMMITTED
    assert committer.commit(second, parts[1], no_rows(second)).outcome is Outcome.UNKNOWN
    assert sink.rows() == [{"id": 1}]
