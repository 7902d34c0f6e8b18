"""`epochsink repair` of a topic whose broker got an older copy of its data back, or of which a partition did.

One broker for all: `before` is the state that is copied, `after` what came later and is lost when the copy is put back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from checkpoint_kit import CheckpointKit
from confluent_kafka import Producer
from kafka_kit import Reader, create_topic, delete_markers, epoch, read_all, rows
from typer.testing import CliRunner
from waiting import wait_until

from epochsink.cli.app import app
from epochsink.errors import WentBack
from epochsink.kafka import Kafka
from epochsink.sink import Identity, Keeping
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import LocalKafka

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

EPOCHS = range(2, 5)
"""What comes after the copy."""
POINTS = (
    "repair.epoch.before",
    "kafka.produced",
    "coordinator.replay.after",
    "kafka.commit.between",
    "repair.epoch.after",
)
RACED = {
    "repair.epoch.before": "another driver writes for this query",
    "coordinator.replay.after": "a driver on another copy of this checkpoint writes for the same query",
}
"""Where a repair is overtaken by another one, and what it says then."""


def values(*numbers: int) -> list[str]:
    return [f"{number}{letter}" for number in numbers for letter in "abcd"]


class Query:
    """A query that writes to a topic, with an epoch of four rows for each number: both partitions get some."""

    def __init__(self, folder: Path, broker: LocalKafka, topic: str, options: dict[str, Any], **settings: Any) -> None:
        self.topic = create_topic(broker.bootstrap_servers, topic, **settings)
        self.module = f"repaired_{topic}".replace("-", "_")
        given = {"bootstrap_servers": broker.bootstrap_servers, "topic": topic, "timeout": 20, **options}
        given["transaction_timeout"] = 600
        (folder / f"{self.module}.py").write_text(
            f"from epochsink import Kafka\nSINKS = {{'sink': Kafka(**{given!r})}}\n"
        )
        sink = Kafka(**given)
        with closing(OneSink.of(sink)) as committer:
            assert committer.check(rows("a").schema) == []
        self.servers = broker.bootstrap_servers
        self.kit = CheckpointKit(folder / topic, {"sink": sink}, retain_seconds=3600.0)

    def run(self, *numbers: int) -> None:
        for number in numbers:
            self.kit.run(number, {"sink": rows(*values(number))})

    def type(self, verb: str, *more: str, root: Path | None = None) -> Result:
        return CliRunner().invoke(app, [verb, str(root or self.kit.root), "--sinks", f"{self.module}:SINKS", *more])

    def copy(self) -> Path:
        """Copy the checkpoint, with its spool."""
        root = self.kit.root.with_name(f"{self.kit.root.name}-copy")
        shutil.copytree(self.kit.root, root)
        return root

    def repair(self) -> Result:
        return self.type("repair", "--yes")

    def kill_at(self, point: str) -> None:
        program = "from epochsink.cli.app import app; app()"
        command = [sys.executable, "-c", program, "repair", str(self.kit.root), "--sinks", f"{self.module}:SINKS"]
        environment = {**os.environ, "EPOCHSINK_FAILPOINT": point}
        done = subprocess.run([*command, "--yes"], env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr

    def read(self, count: int) -> list[str | None]:
        return read_all(self.servers, self.topic, count)

    def go_on(self, number: int) -> None:
        self.kit.coordinator = self.kit.start()
        self.run(number)


class Broker:
    """The broker, and the queries whose topics it has."""

    def __init__(self, folder: Path, broker: LocalKafka) -> None:
        self.folder = folder
        self.broker = broker
        self.restored = Query(folder, broker, "restored", {})
        self.killed = Query(folder, broker, "killed", {"on_rejected": "dead_letter"})
        self.compacted = Query(folder, broker, "compacted", {}, cleanup_policy="compact")
        self.apart = Query(folder, broker, "apart", {})
        self.unmarked = Query(folder, broker, "unmarked", {})
        self.begun_later = Query(folder, broker, "begun-later", {})
        self.raced = {point: Query(folder, broker, f"raced-{point.rpartition('.')[2]}", {}) for point in RACED}
        self.queries = (
            self.restored,
            self.killed,
            self.compacted,
            self.apart,
            self.unmarked,
            self.begun_later,
            *self.raced.values(),
        )

    def put_back(self, *names: str) -> None:
        """Start the broker on the copy of its data, or with the copy of some folders alone."""
        self.broker.stop()
        for name in names or [""]:
            shutil.rmtree(self.broker.data / name)
            shutil.copytree(self.folder / "older" / name, self.broker.data / name)
        self.broker.start()


@pytest.fixture(scope="module")
def set_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("repair")
    with pytest.MonkeyPatch.context() as patch, LocalKafka(short_lived=True) as service:
        patch.chdir(folder)
        broker = Broker(folder, service)
        for query in broker.queries:
            if query is not broker.begun_later:
                query.run(0, 1)
        # open when the copy is made, with all its rows
        broker.restored.kit.record(2, {"sink": rows(*values(2))})
        service.stop()
        shutil.copytree(service.data, folder / "older")
        service.start()
        broker.restored.kit.decide(2)
        assert broker.restored.kit.coordinator.commit_decided()
        broker.restored.run(3, 4)
        broker.begun_later.run(0, 1)
        for query in (broker.killed, broker.compacted, *broker.raced.values()):
            query.run(*EPOCHS)
        broker.put_back()
        yield broker
        for query in broker.queries:
            query.kit.close()
            sys.modules.pop(query.module, None)


def test_rows_that_are_retained_are_in_the_spool_and_not_in_the_topic_alone(set_back: Broker) -> None:
    [participant] = set_back.unmarked.kit.participants
    schemas = {"sink": rows("a").schema}
    assert participant.begin(epoch(2), schemas, retained=True)["sink"].keeping is Keeping.IN_SPOOL
    assert participant.begin(epoch(2), schemas)["sink"].keeping is Keeping.IN_TARGET


def test_a_topic_restored_from_a_copy_gets_its_epochs_again_and_the_query_goes_on(set_back: Broker) -> None:
    """One epoch was open in the copy, and is committed as it is. Others have written to the topic since the restore."""
    query = set_back.restored
    other = Producer({"bootstrap.servers": query.servers, "enable.idempotence": True})
    for key in range(8):
        other.produce(query.topic, value=b"other", key=str(key))
    other.flush()
    with pytest.raises(WentBack) as stopped:
        query.kit.start()
    assert "epochsink repair CHECKPOINT" in stopped.value.hint
    older = query.copy()
    asked = query.type("repair")
    assert "READERS get these rows at the end of the topic" in asked.output
    answer = query.repair()
    assert answer.exit_code == 0, answer.output
    assert query.read(28) == sorted([*values(0, 1, 2, 3, 4), *["other"] * 8])
    with Reader(query.servers, query.topic) as reader:
        for partition in (0, 1):
            found = [message.value() for message in reader.until(28) if message.partition() == partition]
            ours = [value for value in found if value != b"other"]
            assert ours == sorted(ours), "the epochs keep their order"
    again = query.repair()
    assert (again.exit_code, "nothing to repair" in again.output) == (1, True), again.output
    query.go_on(5)
    assert query.read(32) == sorted([*values(0, 1, 2, 3, 4, 5), *["other"] * 8])
    # receipts are compared where the rows are now
    audited = json.loads(query.type("audit", "--json").stdout)["sinks"][0]
    assert not [each for each in audited["epochs"] if each["result"] == "differs"], audited
    # an older copy of the checkpoint does not know of this repair, and must not write the rows a second time
    refused = query.type("repair", "--yes", root=older)
    assert (refused.exit_code, "another copy of this checkpoint" in " ".join(refused.output.split())) == (1, True)
    assert query.read(32) == sorted([*values(0, 1, 2, 3, 4, 5), *["other"] * 8])


def test_a_repair_of_a_topic_that_is_killed_at_one_point_after_another_is_exact(set_back: Broker) -> None:
    query = set_back.killed
    for point in POINTS:
        query.kill_at(point)
    answer = query.repair()
    assert answer.exit_code == 0, answer.output
    assert query.read(20) == values(0, 1, 2, 3, 4)
    query.go_on(5)
    assert query.read(24) == values(0, 1, 2, 3, 4, 5)


def test_a_topic_restored_from_a_copy_older_than_the_query_gets_all_its_epochs_again(set_back: Broker) -> None:
    """No marker is left; the log shows that no record is left either."""
    query = set_back.begun_later
    with pytest.raises(WentBack, match="no marker of this query") as stopped:
        query.kit.start()
    assert "epochsink repair CHECKPOINT" in stopped.value.hint
    answer = query.repair()
    assert answer.exit_code == 0, answer.output
    query.go_on(2)
    assert query.read(12) == values(0, 1, 2)


@pytest.mark.parametrize("point", RACED)
def test_of_two_repairs_on_copies_of_a_checkpoint_the_later_one_writes_alone(
    set_back: Broker, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The later one runs as a whole in the middle of the earlier one, which then stops and has written nothing."""
    query = set_back.raced[point]
    copy = query.copy()
    later: list[Result] = []

    def another_repairs(reached: str) -> None:
        if reached == point and not later:
            monkeypatch.undo()
            later.append(query.type("repair", "--yes", root=copy))

    for module in ("repair", "commit_engine"):
        monkeypatch.setattr(f"epochsink.protocol.{module}.reach", another_repairs)
    earlier = query.repair()
    assert later[0].exit_code == 0, later[0].output
    told = " ".join(earlier.output.split())
    assert (earlier.exit_code, RACED[point] in told) == (1, True), told
    assert query.read(20) == values(0, 1, 2, 3, 4)


def test_a_compacted_topic_gets_its_epochs_again(set_back: Broker) -> None:
    query = set_back.compacted
    answer = query.repair()
    assert answer.exit_code == 0, answer.output
    with Reader(query.servers, query.topic) as reader:

        def newest() -> list[str]:
            return sorted({message.key(): message.value().decode() for message in reader.poll(0.1)}.values())

        wait_until(lambda: newest() == values(4), "the newest row of each key")
        assert newest() == values(4), "nothing follows"
    query.go_on(5)


def test_nothing_is_written_to_a_topic_that_has_rows_without_their_markers(set_back: Broker) -> None:
    query = set_back.unmarked
    delete_markers(query.servers, Identity(query.kit.query_id, "sink"), parities=(0, 1))
    with pytest.raises(WentBack, match="no marker"):
        query.kit.start()
    answer = query.repair()
    assert answer.exit_code == 1
    assert "has no marker of epoch 1, and unmarked-" in " ".join(answer.output.split())
    assert query.read(8) == values(0, 1)


def test_a_partition_that_was_set_back_alone_is_named_and_nothing_is_written(set_back: Broker) -> None:
    query = set_back.apart
    query.go_on(2)
    with Reader(query.servers, query.topic) as reader:
        lost = [message.value().decode() for message in reader.until(12) if message.partition() == 0]
    lost = [value for value in lost if value in values(2)]
    assert 0 < len(lost) < 4
    left = sorted({*values(0, 1, 2)} - {*lost})
    set_back.put_back("apart-0")
    answer = query.repair()
    assert answer.exit_code == 1
    told = " ".join(answer.output.split())
    assert "has the marker of epoch 2, and not all of its records: apart-0 at offset" in told
    audited = json.loads(query.type("audit", "--json").stdout)["sinks"][0]
    assert [(each["epoch"], each["result"]) for each in audited["epochs"]][-1] == (2, "differs")
    assert query.read(len(left)) == left
