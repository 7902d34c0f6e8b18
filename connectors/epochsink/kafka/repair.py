"""Find out which parts of done epochs a topic has lost.

Each partition of a topic and of the markers' topic may have been set back by itself, so neither proves anything alone.
A part is lacking if its marker is not there, and no partition shows its records as committed at the offsets that are
recorded. Where markers and records contradict each other, nothing is written.
"""
# ruff: noqa: ARG002 - a participant has one sink

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from epochsink.errors import WentBack
from epochsink.identity import marker_group
from epochsink.kafka.applied_epochs import Markers, committables, topics_of
from epochsink.kafka.audit import COMMITTED, OTHERS, TransactionTally, tallies, why_uncounted
from epochsink.kafka.commit import refuse_other_topics
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.fence import Fence
from epochsink.kafka.server import KafkaServer, Partition
from epochsink.sink import Committable, LastDone, Losses, Mark
from epochsink.sink.marks import ReadMarks

WARNING = (
    "READERS get these rows at the end of the topic, after all that was written to it since it was set back; a reader "
    "that had read them before gets them a second time"
)


class KafkaLosses(Losses):
    """One search for the lost parts of one sink; ``log_repair`` makes what looks into the log."""

    def __init__(self, marks: ReadMarks, topic: str | None, log_repair: Callable[[], LogRepair]) -> None:
        super().__init__(marks, WARNING)
        self._topic = topic
        self._log_repair = log_repair

    @cached_property
    def _log(self) -> LogRepair:
        return self._log_repair()

    def lacking(self, sink: str, done: LastDone) -> list[Committable]:
        """Return the parts that neither markers nor logs show."""
        return self._log.lacking(done)

    def holds_earlier(self, sink: str) -> bool:
        """Whether each partition of the topic has shown records of an epoch: they are lost from the end."""
        return self._log.show_all(self._topic)


class LogRepair:
    """The search in one cluster; ``key`` is the `identity_key` of the sink. ``lost`` gets the lost transactions."""

    def __init__(self, cluster: KafkaServer, markers: Markers, key: str, fence: Fence, lost: set[Transaction]) -> None:
        self._cluster = cluster
        self._markers = markers
        self._key = key
        self._fence = fence
        self._lost = lost
        self._shown: set[Partition] = set()

    def lacking(self, done: LastDone) -> list[Committable]:
        """Return the parts of a done epoch that are lost. Raises `WentBack` if markers and records do not agree."""
        deadline, parts = self._cluster.deadline(), committables(done)
        # what another driver had begun to commit when this one took the fence
        self._fence.await_others(deadline)
        ids = self._cluster.topic_ids(topics_of(parts), deadline)
        refuse_other_topics(self._cluster.target, done, ids)
        uncounted = {topic for topic in ids if why_uncounted(self._cluster, topic)}
        # before the records: a driver that commits meanwhile is fenced, or is noticed by a marker without records
        marks = self._markers.read_around(done, deadline=deadline)
        counts = tallies(self._cluster, parts, ids)
        look = [_Part(part, counts[part.transaction], not uncounted.isdisjoint(part.topics)) for part in parts]
        applied = [self._is_applied(done, each, marks) for each in look]
        self._shown |= {(tally.place.topic, tally.place.partition) for each in look for tally in each.shown}
        self._lost |= {each.part.transaction for each, there in zip(look, applied, strict=True) if not there}
        return [raw for raw, there in zip(done.parts, applied, strict=True) if not there]

    def show_all(self, topic: str | None) -> bool:
        """Whether each partition of a topic holds the records of an epoch that was looked at, so all earlier ones."""
        if topic is None:
            return False
        deadline = self._cluster.deadline()
        topics, _ = self._cluster.until(deadline, lambda: self._cluster.topics_and([topic], []))
        return all((topic, number) in self._shown for number in topics[topic].leaders)

    def _is_applied(self, done: LastDone, look: _Part, marks: Mapping[str, Mark]) -> bool:
        part, epoch = look.part, done.epoch
        own, other = (
            marks.get(marker_group(self._key, part.partition, parity)) for parity in (epoch % 2, 1 - epoch % 2)
        )
        if own is not None and own.epoch >= epoch:
            if look.is_whole:
                return True
            raise _disagreement(
                f"{self._cluster.target} has the marker of epoch {epoch}, and {look.lost()}",
                "some partitions have lost their newest records and others have not, as after an unclean leader "
                "election; or the epoch was repaired by means of another copy of this checkpoint",
                epoch,
            )
        if other is not None and other.epoch > epoch:
            raise _disagreement(
                f"{self._cluster.target} has no marker of epoch {epoch} of Spark partition {part.partition}, and has "
                f"the one of epoch {other.epoch}",
                "one partition of __consumer_offsets was set back, and another was not",
                epoch,
            )
        if look.is_absent:
            return False
        if own is None and look.is_whole and part.prepared_at <= self._cluster.clock.time() - self._markers.retention():
            # it has expired (offsets.retention.minutes)
            return True
        raise _disagreement(
            f"{self._cluster.target} has no marker of epoch {epoch}, and {look.kept()}",
            "the marker was deleted, or partitions were set back by different amounts",
            epoch,
        )


class _Part:
    """A part, and what the log holds of it. Compaction may have removed records if it is ``compacted``."""

    def __init__(self, part: KafkaCommittable, found: Sequence[TransactionTally], compacted: bool) -> None:  # noqa: FBT001 - a fact
        self.part = part
        self.shown = [tally for tally in found if tally.end == COMMITTED]
        self._found = found
        self._compacted = compacted
        self._deleted = [tally for tally in found if tally.is_deleted]
        self._left = [tally for tally in found if tally.end != COMMITTED and not tally.is_deleted]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing but what retention or compaction may delete."""
        if self._compacted:
            return not any(tally.end != OTHERS for tally in self._left)
        counted = sum(tally.records for tally in self._found)
        return not self._left and (bool(self._deleted) or counted == self.part.rows)

    @property
    def is_absent(self) -> bool:
        """Whether no place holds its records as committed, for certain."""
        compacted = self._compacted and any(tally.end == OTHERS for tally in self._left)
        return not (self.shown or self._deleted or compacted)

    def lost(self) -> str:
        """Return, in words, where records are missing."""
        where = [f"{_place(tally)} has {tally.end or 'nothing'}" for tally in self._left]
        return f"not all of its records: {'; '.join(where) or 'their number differs'}"

    def kept(self) -> str:
        """Return, in words, where records are, or may have been."""
        held = [f"{_place(tally)} holds its records" for tally in self.shown]
        held += [f"retention has deleted what {_place(tally)} held" for tally in self._deleted]
        held += [f"what {_place(tally)} held may be compacted" for tally in self._left if tally.end == OTHERS]
        return "; ".join(held)


def _place(tally: TransactionTally) -> str:
    return f"{tally.place.topic}-{tally.place.partition} at offset {tally.place.start}"


def _disagreement(what: str, why: str, epoch: int) -> WentBack:
    return WentBack(
        f"{what}: {why}; what is lacking cannot be told exactly, and nothing is written",
        hint=f"load what is lacking (offsets/ in the checkpoint has the input of epoch {epoch}) with a separate query; "
        "if the query does not start after that, type what its error says. What the newest epochs have lost: "
        "epochsink audit CHECKPOINT --sinks MODULE:ATTRIBUTE",
    )
