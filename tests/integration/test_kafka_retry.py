"""A retry of dead letters writes their rows and settles the letters in one transaction: once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from fix_kafka import NEWEST_LEVEL
from kafka_kit import (
    NO_ROWS,
    Reader,
    abort,
    change_settings,
    commit_with_letters,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    setting_aside,
    told,
)
from typer.testing import CliRunner
from waiting import wait_until

from epochsink import arrow_buffers
from epochsink.cli.app import app
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.kafka import Kafka, letters
from epochsink.kafka.dead_letter import NO_KEY
from epochsink.kafka.errors import Unreachable
from epochsink.sink import Chosen, Retried

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink.kafka.letters import KafkaLetters
    from epochsink.sink import Identity
    from epochsink_devkit.services import KafkaService

pytestmark = pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=str)

ALL = Chosen()
LARGE = "x" * 3_000


@dataclass
class Rig:
    """A sink whose topic takes no row of 2,000 bytes until `correct`."""

    kafka: KafkaService
    topic: str
    who: Identity
    timeout: float = 20

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.kafka.bootstrap_servers,
            "topic": self.topic,
            "on_rejected": "dead_letter",
            "timeout": self.timeout,
        }

    def apply(self, number: int, *values: str | bytes, **columns: Any) -> int:
        """Take an epoch through all its steps; return how many rows became letters."""
        config, at = Kafka(**self.settings), epoch(number)
        with committing(config, self.who) as committer:
            part = prepare(config, told(committer, self.who, at), rows(*values, **columns))
            return commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS))

    def correct(self) -> None:
        change_settings(self.kafka.bootstrap_servers, self.topic, {"max.message.bytes": "9000"})

    @contextmanager
    def letters(self, **settings: Any) -> Iterator[KafkaLetters]:
        with committing(Kafka(**{**self.settings, **settings}), self.who) as committer:
            yield committer.participant.operator().letters("topic")

    def retry(self, chosen: Chosen = ALL, **settings: Any) -> Retried:
        with self.letters(**settings) as found:
            return found.retry(chosen)

    def count(self) -> int:
        with self.letters() as found:
            return found.count(ALL)

    def values(self, count: int) -> list[str | None]:
        """Return the values in the topic, once there are ``count``."""
        return read_all(self.kafka.bootstrap_servers, self.topic, count)

    def elsewhere(self, point: str, signal_name: str = "KILL") -> subprocess.Popen[str]:
        """Retry all letters in a process that kills or stops itself at ``point``."""
        armed = {"EPOCHSINK_FAILPOINT": point, "EPOCHSINK_FAILPOINT_SIGNAL": signal_name}
        process = subprocess.Popen(
            [sys.executable, "-c", _RETRY, json.dumps(self.settings), self.who.query_id],
            env={**os.environ, **armed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if signal_name == "KILL":
            said, _ = process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL, said
        else:
            stopped = psutil.STATUS_STOPPED
            wait_until(lambda: psutil.Process(process.pid).status() == stopped, f"a process at {point}")
        return process


_RETRY = """
import json, sys
from epochsink.kafka import Kafka
from epochsink.sink import Chosen, Identity
from epochsink.testing.sink_rig import OneSink
settings, query_id = sys.argv[1:]
committer = OneSink.of(Kafka(**json.loads(settings)), "topic")
committer.open(Identity(query_id, "topic", 1))
print(committer.participant.operator().letters("topic").retry(Chosen()))
"""


def continued(process: subprocess.Popen[str]) -> str:
    """Let a stopped process continue to its end; return what it says."""
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=60)[0]


@pytest.fixture
def rig(kafka: KafkaService, fresh_topic: FreshName) -> Rig:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), 2, max_message_bytes="2000")
    setting_aside(kafka, topic)
    return Rig(kafka, topic, identity())


def test_a_retry_writes_what_the_topic_takes_by_now_as_it_was_and_keeps_the_rest(rig: Rig) -> None:
    times = pa.array([1_600_000_000_000, 1_600_000_000_001, 1_600_000_000_002], pa.timestamp("ms", "UTC"))
    headers = pa.array([[{"key": "h", "value": b"\xff"}], None, [{"key": "n", "value": None}]])
    values = (b"\xff" + LARGE.encode(), b"small", LARGE.encode() * 4)
    assert rig.apply(0, *values, keys=["k", "s", "l"], timestamp=times, headers=headers) == 2
    assert rig.retry().kept == 2
    assert rig.count() == 2
    rig.correct()
    done = rig.retry()
    assert (done.written, done.superseded, done.kept) == (1, 0, 1)
    assert "max.message.bytes = 9000 of the topic" in done.reason
    with Reader(rig.kafka.bootstrap_servers, rig.topic) as reader:
        found = {one.key(): (one.value(), one.headers(), one.timestamp()[1]) for one in reader.until(2)}
    assert found[b"k"] == (values[0], [("h", b"\xff")], 1_600_000_000_000)
    with rig.letters() as kept:
        [left] = kept.read(ALL, 9)
        assert left.row["key"] == "l"
    assert rig.retry() == Retried(kept=1, reason=done.reason)
    # the query goes on beside them
    assert rig.apply(1, "b") == 0
    with Reader(rig.kafka.bootstrap_servers, rig.topic) as reader:
        assert len(reader.until(3)) == 3


def test_text_that_is_not_utf_8_in_a_refused_row_is_written_as_it_was(rig: Rig) -> None:
    """A string of Spark's holds any bytes, and a message takes any bytes as key, value and value of a header."""
    value = LARGE.encode() + b"\xff\xed\xa0\x80"
    bad = arrow_buffers.texts([b"\xfe"], pa.binary()).view(pa.string())
    names = pa.StructArray.from_arrays([pa.array(["h"]), bad], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), names)
    batch = pa.record_batch({"key": bad, "value": pa.array([value]).view(pa.string()), "headers": headers})
    config, at = Kafka(**rig.settings), epoch(0)
    with committing(config, rig.who) as committer:
        part = prepare(config, told(committer, rig.who, at), batch)
        assert commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS)) == 1
    with rig.letters() as found:
        assert found.read(ALL, 1)[0].row["value"].endswith("\\xff\\xed\\xa0\\x80")
    rig.correct()
    assert rig.retry() == Retried(written=1)
    with Reader(rig.kafka.bootstrap_servers, rig.topic) as reader:
        [one] = reader.until(1)
    assert (one.key(), one.value(), one.headers()) == (b"\xfe", value, [("h", b"\xfe")])


def test_any_letters_in_any_order_are_retried_or_dropped_and_no_other_is_touched(rig: Rig) -> None:
    assert rig.apply(0, *(f"{n}{LARGE}" for n in range(3))) == 3
    assert rig.apply(1, f"3{LARGE}") == 1
    other = Rig(rig.kafka, rig.topic, identity())
    assert other.apply(0, f"other{LARGE}") == 1
    rig.correct()
    with rig.letters() as found:
        ids = {letter.row["value"][0]: letter.id for letter in found.read(ALL, 9)}
        assert found.retry(Chosen((ids["2"],))) == Retried(written=1)
        assert found.drop(Chosen((ids["0"], ids["2"]))) == 1, "what is written is no letter any more"
        assert found.retry(Chosen(epoch=1)) == Retried(written=1)
        assert [letter.id for letter in found.read(ALL, 9)] == [ids["1"]]
        assert found.retry(ALL) == Retried(written=1)
        assert (found.retry(ALL), found.drop(ALL), found.count(ALL)) == (Retried(), 0, 0)
    assert sorted(str(value)[0] for value in rig.values(3)) == ["1", "2", "3"]
    assert other.count() == 1


def test_a_row_without_a_key_stays_a_letter_and_can_be_dropped(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    setting_aside(kafka, topic)
    rig = Rig(kafka, topic, identity())
    with rig.letters(key="id") as found:
        config, at = Kafka(**rig.settings, key="id"), epoch(0)
        with committing(config, rig.who) as committer:
            part = prepare(config, told(committer, rig.who, at), rows("a", "b", keys=[None, "1"]))
            commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS))
        assert found.retry(ALL) == Retried(kept=1, reason=NO_KEY)
        assert found.drop(ALL) == 1
        assert found.count(ALL) == 0
    assert rig.values(1) == ["b"]


def test_a_letter_for_another_topic_stays(rig: Rig, fresh_topic: FreshName) -> None:
    assert rig.apply(0, LARGE) == 1
    topic = create_topic(rig.kafka.bootstrap_servers, fresh_topic())
    done = rig.retry(topic=topic, dead_letter_topic=f"{rig.topic}.dead_letter")
    assert (done.written, done.kept) == (0, 1)
    assert f"it was for topic '{rig.topic}'" in done.reason


@pytest.mark.parametrize(
    ("point", "written"),
    [("kafka.letters.read", 0), ("kafka.letters.written", 0), ("kafka.letters.committed", 2)],
)
def test_a_retry_that_is_killed_anywhere_is_repeated_exactly(point: str, written: int, rig: Rig) -> None:
    assert rig.apply(0, "a", f"b{LARGE}", f"c{LARGE}") == 2
    rig.correct()
    rig.elsewhere(point)
    assert rig.retry() == Retried(written=2 - written)
    assert [str(value)[0] for value in rig.values(3)] == ["a", "b", "c"]
    assert (rig.count(), rig.retry()) == (0, Retried())


@pytest.mark.parametrize("point", ["kafka.letters.read", "kafka.letters.written"])
def test_a_retry_that_was_asleep_while_another_one_ran_writes_nothing(point: str, rig: Rig) -> None:
    assert rig.apply(0, "a", f"b{LARGE}") == 1
    rig.correct()
    asleep = rig.elsewhere(point, "STOP")
    assert rig.retry() == Retried(written=1)
    said = continued(asleep)
    assert asleep.returncode == 1
    assert "what is done is not done twice" in said, said
    assert [str(value)[0] for value in rig.values(2)] == ["a", "b"]


def test_an_open_transaction_that_hides_an_earlier_retry_is_waited_for(rig: Rig) -> None:
    """Readers of committed records stop before it: to them, the letter looks as if it was not written yet."""
    assert rig.apply(0, "a", f"b{LARGE}") == 1
    other, at = identity(), epoch(0)
    config = Kafka(**rig.settings)
    with committing(config, other) as committer:
        task = told(committer, other, at)
        rig.correct()
        asleep = rig.elsewhere("kafka.letters.read", "STOP")
        hiding = prepare(config, task, rows(LARGE))
        assert "written=1" in continued(asleep)
        assert rig.count() == 1, "a list shows what readers see"
        with pytest.raises(Unreachable, match="open there hides"):
            rig.retry(timeout=3)
        with pytest.raises(Unreachable, match="open there hides"), rig.letters(timeout=3) as found:
            found.drop(ALL)
        abort(committer, hiding)
    assert rig.retry() == Retried()
    assert [str(value)[0] for value in rig.values(2)] == ["a", "b"]


def test_several_retries_at_once_write_each_row_once(rig: Rig) -> None:
    assert rig.apply(0, *(f"{n}{LARGE}" for n in range(40))) == 40
    rig.correct()

    def retry(_: int) -> int:
        try:
            return rig.retry().written
        except (PrepareFailed, OutcomeUnknown):
            return 0

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(retry, range(3)))
    rig.retry()
    assert len(rig.values(40)) == len(set(rig.values(40))) == 40
    assert rig.count() == 0


def test_many_letters_are_written_in_several_transactions(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "_AT_ONCE_BYTES", 10_000)
    assert rig.apply(0, *(f"{n}{LARGE if n % 4 else LARGE * 4}" for n in range(12))) == 12
    rig.correct()
    done = rig.retry()
    assert (done.written, done.kept) == (9, 3)
    assert len(rig.values(9)) == 9
    with rig.letters() as found:
        assert (found.drop(ALL), found.count(ALL)) == (3, 0)


def test_an_operator_lists_retries_and_drops_the_letters_of_a_checkpoint(
    tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "topic_with_letters.py").write_text(
        f"from epochsink import Kafka\nSINKS = {{'topic': Kafka(**{rig.settings!r})}}\n"
    )
    monkeypatch.chdir(tmp_path)
    place = [str(tmp_path / "checkpoint"), "--sinks", "topic_with_letters:SINKS"]

    def run(*typed: str) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(app, ["letters", typed[0], *place, "--json", *typed[1:]])
        return result.exit_code, json.loads(result.output)

    kit = CheckpointKit(tmp_path / "checkpoint", {"topic": Kafka(**rig.settings)})
    with closing(kit):
        kit.run(0, {"topic": rows("a", f"b{LARGE}", f"c{LARGE}")})
        assert run("list")[1]["sinks"][0]["count"] == 2
        assert run("retry", "--all", "--yes")[0] == 3
        rig.correct()
        newest = run("list", "--limit", "1")[1]["sinks"][0]["letters"][0]["id"]
        status, done = run("retry", "--id", newest, "--yes")
        assert (status, done["written"], done["kept"]) == (0, 1, 0)
        # what was added is no difference to the receipts
        result = CliRunner().invoke(app, ["audit", *place])
        assert (result.exit_code, "differs" in result.output) == (0, False)
        assert run("drop", "--all", "--yes")[1]["dropped"] == 1
        assert run("list")[1]["sinks"][0]["count"] == 0
        kit.run(1, {"topic": rows("d")})
    assert len(rig.values(3)) == 3
    sys.modules.pop("topic_with_letters")
