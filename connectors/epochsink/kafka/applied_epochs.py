"""Read the markers of applied epochs: offsets of two consumer groups for each Spark partition.

Each transaction commits its epoch as the offset of its partition's group, and the attempt as the metadata. The marker
becomes visible together with the rows. It is stored under a topic that the Spark partition has written to; the largest
offset counts. Even and odd epochs have separate groups, so that an epoch's marker does not hide the loss of the one
before. EndTxn takes no condition: if the cluster is set back just before EndTxn, only the markers show that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final

from epochsink.identity import marker_group, marker_group_prefix
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.server import GroupOffsets, KafkaServer, raise_for, require_all
from epochsink.sink import LastDone, Mark, Marks

DAY_SECONDS = 86_400
_SETTLE_SECONDS: Final = 2.0
"""For how long a marker is waited for that a broker may show late; it takes milliseconds."""


class Markers:
    """The markers of one identity. Every method may raise `Unreachable`, `Refused`.

    ``key`` is its `identity_key`; ``topic`` is the topic of all rows, or None if each row names its own.
    """

    def __init__(self, cluster: KafkaServer, key: str, topic: str | None = None) -> None:
        self._cluster = cluster
        self._key = key
        self._topics = [] if topic is None else [topic]
        self._retention: float | None = None

    def marks_of(self, last: LastDone) -> dict[str, Mark]:
        """Return the marks that an epoch leaves, by group."""
        return {self._group(last.epoch, part): Mark(last.epoch, last.attempt) for part in committables(last)}

    def read_around(self, *epochs: LastDone | None, deadline: float) -> dict[str, Mark]:
        """Return the marks, even and odd, of all Spark partitions of these epochs, by group. Sends one request."""
        parts = [part for last in epochs if last for part in committables(last)]
        return self.read(
            {marker_group(self._key, part.partition, parity) for part in parts for parity in (0, 1)}, deadline
        )

    def read(
        self, groups: Collection[str], deadline: float, *, settled_in: Collection[str] | None = None
    ) -> dict[str, Mark]:
        """Return the marks of these groups; a group without an offset is left out.

        Brokers before 4.0 may show a marker only some time after the coordinator says that its commit is complete
        (KAFKA-17507). With ``settled_in``, wait for that: until no transaction is open or being ended that has an
        offset for these groups, under these topics or where they have a mark. If one stays open, it is not that commit.
        """
        if not groups:
            return {}
        if settled_in is not None:
            # not longer: it may be an open transaction of another attempt, which is aborted only after this read
            patience = min(deadline, self._cluster.clock.monotonic() + _SETTLE_SECONDS)
            with suppress(Unreachable):
                settled: dict[str, Mark] = self._cluster.until(
                    patience, lambda: self._read_once(sorted(groups), settled_in)
                )
                return settled
        # without RequireStable: the next epoch's transaction is often open now, and must not be waited for
        marks: dict[str, Mark] = self._cluster.until(deadline, lambda: self._read_once(sorted(groups), None))
        return marks

    def of_partition(self, partition: int, deadline: float) -> int | None:
        """Return the newest epoch applied in a Spark partition; None if there is no offset."""
        return _newest(self.read([marker_group(self._key, partition, parity) for parity in (0, 1)], deadline))

    def settled(self, epoch: int, part: KafkaCommittable, deadline: float) -> int | None:
        """Return the newest epoch in the group of an epoch's part, once it is settled; None if there is no offset."""
        return _newest(self.read([self._group(epoch, part)], deadline, settled_in=part.topics))

    def read_all(self, deadline: float, *, settled: bool = False, besides: LastDone | None = None) -> dict[str, Mark]:
        """Return the marks of all Spark partitions, including those of earlier runs.

        If ``settled``, they are waited for as `read` does, and those of the epoch ``besides`` are left out: its
        transactions may be open.
        """
        prefix = marker_group_prefix(self._key)
        listed = self._cluster.until(deadline, self._cluster.list_groups)
        groups = {name for name in listed if name.startswith(prefix)}
        if settled and besides is not None:
            groups -= self.marks_of(besides).keys()
        return self.read(groups, deadline, settled_in=self._topics if settled else None)

    def compared(self, marks: Mapping[str, Mark], done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return marks that were read beside those that these epochs leave, without those that may have expired."""
        must = self.marks_of(self.unexpired(done, marks)) if done else {}
        may = self.marks_of(pending) if pending else {}
        return Marks(self._cluster.target, marks, must, may, rows_tell=True)

    def unexpired(self, done: LastDone, marks: Mapping[str, Mark]) -> LastDone:
        """Return ``done`` without the parts whose marker may have expired (offsets.retention.minutes)."""
        known = list(zip(committables(done), done.parts, strict=True))
        if all(self._group(done.epoch, part) in marks for part, _ in known):
            return done
        # a marker that is younger than the retention must still exist
        oldest = self._cluster.clock.time() - self.retention()
        # a marker that is there is compared, whatever its age
        kept = [raw for part, raw in known if self._group(done.epoch, part) in marks or part.prepared_at > oldest]
        return LastDone(done.epoch, done.attempt, tuple(kept))

    def retention(self) -> float:
        """Return for how many seconds the broker keeps offsets of groups without members."""
        if self._retention is None:
            self._retention = self._ask_retention()
        return self._retention

    def _ask_retention(self) -> float:
        minutes = self._cluster.broker_setting("offsets.retention.minutes")
        # without the right to ask, assume a day: an expired marker must never count as absent
        return DAY_SECONDS if minutes is None else 60.0 * int(minutes)

    def _group(self, epoch: int, part: KafkaCommittable) -> str:
        return marker_group(self._key, part.partition, epoch % 2)

    def _read_once(self, groups: list[str], settled_in: Collection[str] | None) -> dict[str, Mark]:
        offsets = self._ask(groups, None, stable=settled_in is not None)
        if settled_in:
            # by name too: asked for all topics, brokers do not tell that the first offset under a topic is under way
            offsets += self._ask(groups, settled_in, stable=True)
        marks: dict[str, Mark] = {}
        require_all(groups, (each.group for each in offsets), "groups")
        for each in offsets:
            raise_for(each.error_code, f"the offsets of group {each.group}")
            for mark in _marks(each):
                if each.group not in marks or mark.epoch > marks[each.group].epoch:
                    marks[each.group] = mark
        return marks

    def _ask(self, groups: list[str], topics: Collection[str] | None, *, stable: bool) -> list[GroupOffsets]:
        stored = self._cluster.group_offsets(groups, topics, stable=stable)
        for each in stored:
            # if it has an error, that is raised; if it has an offset under no topic, each topic is in the answer
            if topics is not None and not each.error_code:
                require_all(topics, (topic for topic, offsets in each.topics.items() if offsets), each.group)
        return stored


def committables(last: LastDone) -> list[KafkaCommittable]:
    """Return the parts of an epoch."""
    return [KafkaCommittable.from_json(part) for part in last.parts]


def topics_of(parts: Iterable[KafkaCommittable]) -> dict[str, str]:
    """Return the ids of the topics that an epoch was written to, by name."""
    return {topic: known for part in parts for topic, known in part.topics.items()}


def _marks(group: GroupOffsets) -> list[Mark]:
    kept = [offset for offsets in group.topics.values() for offset in offsets]
    for offset in kept:
        raise_for(offset.error_code, f"an offset of group {group.group}")
    return [Mark(offset.offset, offset.metadata) for offset in kept if offset.offset >= 0]


def _newest(marks: Mapping[str, Mark]) -> int | None:
    return max((mark.epoch for mark in marks.values()), default=None)
