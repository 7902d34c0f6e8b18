"""A lost transaction is found in the log whole, or refused: each way in which a log can lack a part of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from record_batches import CONTROL, batch

from epochsink.errors import LogIncomplete, SpoolMissing
from epochsink.kafka import Kafka, redo
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Transaction, WrittenPartition
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.redo import lost_batches
from epochsink.sink import Epoch, Identity, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TASK = Task(Identity("query", "orders"), Epoch(5, "a" * 32), 0, "b" * 32)
OTHER = 8


class KeptLog:
    """One topic, each partition a list of batches; ``starts`` as retention has left them."""

    topic = "orders.clean"
    clock = time

    def __init__(self, *partitions: Sequence[bytes], starts: Mapping[int, int] | None = None) -> None:
        self._partitions = partitions
        self._starts = dict(starts or {})

    def starts(self) -> dict[int, int]:
        return {number: self._starts.get(number, 0) for number in range(len(self._partitions))}

    def ends(self) -> dict[int, int]:
        return {number: max(map(after, kept), default=0) for number, kept in enumerate(self._partitions)}

    def fetch(self, positions: Mapping[int, int]) -> dict[int, bytes | None]:
        """Return one batch of each partition."""
        found: dict[int, bytes | None] = {}
        for number, position in positions.items():
            kept = [one for one in self._partitions[number] if after(one) > position]
            found[number] = None if position < self.starts()[number] else kept[0] if kept else b""
        return found


def after(kept: bytes) -> int:
    return int.from_bytes(kept[:8], "big") + int.from_bytes(kept[23:27], "big") + 1


def lost(rows: int, *starts: int) -> KafkaCommittable:
    return KafkaCommittable(
        transaction=Transaction("epochsink.x", 7, 3),
        partition=0,
        task="b" * 32,
        rows=rows,
        prepared_at=0,
        topics={"orders.clean": "f" * 32},
        kept_in_topic=True,
        places=tuple(WrittenPartition("orders.clean", partition, start) for partition, start in enumerate(starts)),
    )


def found(log: Any, of: KafkaCommittable, *, timeout: float = 5.0) -> list[tuple[int, int]]:
    """Return (partition, base offset) of what is found."""
    return [(partition, one.base_offset) for partition, one in lost_batches(log, of, log.ends(), timeout, TASK)]


def test_only_what_this_very_transaction_has_written_is_taken() -> None:
    log = KeptLog(
        [
            batch(b"x", offset=0),  # before the epoch began, by an earlier user of the numbers
            batch(b"a", b"b", offset=1),
            batch(b"x", offset=3, producer_id=OTHER),
            batch(b"x", offset=4, producer_epoch=2),
            batch(b"c", offset=5, sequence=2),
            batch(b"x", offset=6, producer_epoch=4),
        ],
        [batch(b"x", offset=0, producer_id=OTHER, attributes=CONTROL), batch(b"d", offset=1)],
    )
    assert sorted(found(log, lost(4, 1, 0))) == [(0, 1), (0, 5), (1, 1)]


def test_a_partition_that_the_topic_has_no_more_is_named() -> None:
    """Somebody has created the topic again, with fewer partitions."""
    with pytest.raises(LogIncomplete, match=r"cannot be read .* it has no partition\(s\) 1, 2 any more"):
        found(KeptLog([batch(b"a", offset=0)]), lost(3, 0, 0, 0))


def test_each_partition_begins_with_the_first_sequence_number() -> None:
    log = KeptLog([batch(b"a", offset=0)], [batch(b"b", offset=0, sequence=1)])
    with pytest.raises(LogIncomplete, match="sequence number 1 of the transaction, and 0 was expected"):
        found(log, lost(2, 0, 0))


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([batch(b"a", offset=0), batch(b"c", offset=2, sequence=2)], "and 1 was expected"),
        ([batch(b"b", b"c", offset=1, sequence=1)], "and 0 was expected"),
        ([batch(b"a", b"b", offset=0)], "2 of 3 records of the transaction are left"),
        ([], "0 of 3 records of the transaction are left"),
        ([batch(b"a", offset=0), batch(b"a", offset=1), batch(b"b", offset=2, sequence=1)], "and 1 was expected"),
        ([batch(b"a", b"b", b"c", offset=0, left=2)], "2 records that was written with 3"),
        ([batch(b"a", b"b", b"c", b"d", offset=0)], "more than the 3 records"),
        (
            [batch(b"a", b"b", offset=0), batch(b"", offset=2, producer_epoch=4, attributes=CONTROL),
             batch(b"c", offset=3, sequence=2)],
            "2 of 3 records",
        ),
    ],
    ids=["a gap", "no beginning", "no end", "nothing", "twice", "compacted", "too many", "after its end"],
)  # fmt: skip
def test_a_log_that_lacks_anything_is_refused_with_the_way_out(kept: list[bytes], why: str) -> None:
    with pytest.raises(LogIncomplete, match=why) as raised:
        found(KeptLog(kept), lost(3, 0))
    assert "resolve CHECKPOINT 5 --sink orders --as discard" in raised.value.hint
    assert "none of them is applied" in raised.value.message


def test_what_retention_has_deleted_is_said() -> None:
    log = KeptLog([batch(b"c", offset=12, sequence=2)], starts={0: 12})
    with pytest.raises(LogIncomplete, match="partition 0 now begins at offset 12, and the epoch began at 10"):
        found(log, lost(3, 10))


def test_a_log_that_was_cut_off_before_the_epoch_began_is_refused() -> None:
    """As an unclean leader election leaves it; meanwhile others have written in its place."""
    cut = KeptLog([batch(b"x", b"y", offset=3, producer_id=OTHER)])
    for start in (4, 50):
        with pytest.raises(LogIncomplete, match="0 of 3 records"):
            found(cut, lost(3, start))


def test_retention_that_deletes_only_what_came_before_does_no_harm() -> None:
    log = KeptLog([batch(b"a", b"b", offset=12)], starts={0: 12})
    assert found(log, lost(2, 10)) == [(0, 12)]


def test_retention_that_deletes_while_it_is_read_is_noticed() -> None:
    class Shrinking(KeptLog):
        def fetch(self, positions: Mapping[int, int]) -> dict[int, bytes | None]:
            self._starts[0] = 12
            return super().fetch(positions)

    log = Shrinking([batch(b"a", b"b", offset=10), batch(b"c", offset=12, sequence=2)])
    with pytest.raises(LogIncomplete, match="begins at offset 12"):
        found(log, lost(3, 10))


def test_brokers_that_do_not_show_what_is_there_are_not_waited_for_for_ever() -> None:
    class Silent(KeptLog):
        def fetch(self, positions: Mapping[int, int]) -> dict[int, bytes | None]:
            return dict.fromkeys(positions, b"")

    with pytest.raises(Unreachable, match="does not show its records"):
        found(Silent([batch(b"a", offset=0)]), lost(1, 0), timeout=0.0)


class Spooled:
    """A task's rows, of which ``kept`` are left."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def read(self, task: str) -> Any:
        del task
        yield from (pa.record_batch({"value": ["x"]}) for _ in range(self._kept))


class Writer:
    """Takes rows in place of a transaction."""

    ended: str = ""

    def __init__(self, *_: object, cluster: object) -> None:
        pass

    def write(self, batch: pa.RecordBatch) -> None:
        pass

    def prepare(self) -> Any:
        type(self).ended = "prepared"
        return lost(3, 0).to_json()

    def abort(self) -> None:
        type(self).ended = "aborted"


@pytest.mark.parametrize(("kept", "ended"), [(3, "prepared"), (2, "aborted"), (4, "aborted"), (0, "")])
def test_a_spool_that_lacks_rows_makes_no_transaction(kept: int, ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "ended", "")
    monkeypatch.setattr(redo, "KafkaWriter", Writer)
    monkeypatch.setattr(Cluster, "broker_setting", lambda *_: None)
    config, spooled = (
        Kafka(bootstrap_servers="broker:9092", topic="orders.clean"),
        replace(lost(3), kept_in_topic=False),
    )

    def again() -> KafkaCommittable:
        return redo.prepare_again(config, Cluster("broker:9092", {}, 1.0), TASK, spooled, Spooled(kept))  # type: ignore[arg-type] # has what is read

    if ended == "prepared":
        assert again().rows == 3
    else:
        with pytest.raises(SpoolMissing):
            again()
    assert Writer.ended == ended
