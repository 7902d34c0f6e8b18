"""Find out which parts of done epochs a topic has lost, and write them again.

Each partition of a topic and of the markers' topic may have been set back by itself, so neither proves anything alone.
A part is lacking if its marker is not there, and no partition shows its records as committed at the offsets that are
recorded. Where markers and records contradict each other, nothing is written.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from epochsink.errors import WentBack
from epochsink.identity import marker_group
from epochsink.kafka.applied_epochs import committables, topics_of
from epochsink.kafka.audit import COMMITTED, OTHERS, tallies, why_uncounted
from epochsink.kafka.commit import refuse_other_topics
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.witness import Witness
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.kafka.applied_epochs import Markers
    from epochsink.kafka.audit import Tally
    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.leaders import Partition
    from epochsink.sink import Ballots, Committable, Epoch, LastDone, Mark, Participant, Recorder, Verdict

WARNING = (
    "READERS get these rows at the end of the topic, after all that was written to it since it was set back; a reader "
    "that had read them before gets them a second time"
)


class Repair:
    """The search for lost parts in one cluster, and their return; ``key`` is the `identity_key` of the sink."""

    def __init__(self, cluster: Cluster, markers: Markers, key: str) -> None:
        self._cluster = cluster
        self._markers = markers
        self._key = key
        self._witness = Witness(cluster)
        self._shown: set[Partition] = set()

    def lacking(self, done: LastDone) -> list[Committable]:
        """Return the parts of a done epoch that are lost. Raises `WentBack` if markers and records do not agree."""
        deadline, parts = self._cluster.deadline(), committables(done)
        ids = self._cluster.topic_ids(topics_of(parts), deadline)
        refuse_other_topics(self._cluster.target, done, ids)
        uncounted = {topic for topic in ids if why_uncounted(self._cluster, topic)}
        # before the records: a driver that commits meanwhile is fenced, or is noticed by a marker without records
        marks = self._markers.read_around(done, deadline=deadline)
        found = tallies(self._cluster, parts, ids)
        look = [_Part(part, found[part.transaction], not uncounted.isdisjoint(part.topics)) for part in parts]
        applied = [self._is_applied(done, each, marks) for each in look]
        self._shown |= {(tally.place.topic, tally.place.partition) for each in look for tally in each.shown}
        return [raw for raw, there in zip(done.parts, applied, strict=True) if not there]

    def show_all(self, topic: str | None) -> bool:
        """Whether each partition of a topic holds the records of an epoch that was looked at, so all earlier ones."""
        if topic is None:
            return False
        deadline = self._cluster.deadline()
        topics, _ = self._cluster.until(deadline, lambda: self._cluster.topics_and([topic], []))
        return all((topic, number) in self._shown for number in topics[topic].leaders)

    def is_open(self, part: Committable) -> bool:
        """Whether a lost part is open again with all its rows, as it was when the cluster was copied."""
        seen = self._witness.look([KafkaCommittable.from_json(part)], (), self._cluster.deadline())
        return bool(seen.whole)

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
        if own is None and look.is_whole and part.prepared_at <= time.time() - self._markers.retention():
            # it has expired (offsets.retention.minutes)
            return True
        raise _disagreement(
            f"{self._cluster.target} has no marker of epoch {epoch}, and {look.kept()}",
            "the marker was deleted, or partitions were set back by different amounts",
            epoch,
        )


class _Part:
    """A part, and what the log holds of it. Compaction may have removed records if it is ``compacted``."""

    def __init__(self, part: KafkaCommittable, found: Sequence[Tally], compacted: bool) -> None:  # noqa: FBT001 - a fact
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


def _place(tally: Tally) -> str:
    return f"{tally.place.topic}-{tally.place.partition} at offset {tally.place.start}"


def _disagreement(what: str, why: str, epoch: int) -> WentBack:
    return WentBack(
        f"{what}: {why}; what is lacking cannot be told exactly, and nothing is written",
        hint="'epochsink audit' shows what the newest epochs have lost. Load what is lacking (offsets/ in the "
        f"checkpoint has the input of epoch {epoch}) with a query of its own; if the query does not start after that, "
        "type what its error says",
    )


def reapply(
    participant: Participant,
    epoch: Epoch,
    ballots: Ballots,
    is_open: Callable[[Committable], bool],
    record: Recorder,
) -> Mapping[str, Sequence[Verdict]]:
    """Commit the lacking parts of an epoch that are open again; write the others again, record and commit them.

    The caller has taken the fence, has swept, and then found the parts lacking: so nobody else commits them.
    """
    ((name, ballot),) = ballots.items()
    verdicts: list[Verdict] = []
    again: list[Committable] = []
    for lost in ballot.parts:
        part = lost
        if not is_open(lost):
            part = participant.replay(epoch, lost, {name: replace(ballot, parts=[lost])}, uuid.uuid4().hex)
        # before the commit: where its records are must be known as soon as readers see them. Also if it is open: an
        # earlier repair may have died while it recorded it
        record(lost, part)
        again.append(part)
        verdicts += participant.commit(epoch, {name: replace(ballot, parts=[part])})[name]
        if verdicts[-1].outcome is not Outcome.COMMITTED:
            return {name: verdicts}
    participant.await_visible(epoch, {name: replace(ballot, parts=again)})
    return {name: verdicts}
