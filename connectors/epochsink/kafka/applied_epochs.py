"""Read the markers of applied epochs: offsets of two consumer groups for each Spark partition.

Each transaction commits its epoch as the offset of its partition's group, and the attempt as the metadata. The marker
becomes visible together with the rows. It is stored under a topic that the Spark partition has written to; the largest
offset counts. Even and odd epochs have separate groups, so that an epoch's marker does not hide the loss of the one
before. EndTxn takes no condition: if the cluster is set back just before EndTxn, only the markers show that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.admin import ListGroupsRequest
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import CoordinatorType

from epochsink.identity import marker_group, marker_group_prefix
from epochsink.kafka.cluster import raise_for
from epochsink.kafka.committable import KafkaCommittable
from epochsink.sink import LastDone, Mark

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from epochsink.kafka.cluster import Cluster

DAY_SECONDS = 86_400
_SEVERAL_GROUPS: Final = 8
"""The first version of OffsetFetch that takes many groups, in brokers since 3.0."""


class Markers:
    """The markers of one identity; ``key`` is its `identity_key`. Every method may raise what `Cluster` raises."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster = cluster
        self._key = key
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

    def read(self, groups: Collection[str], deadline: float, *, settled: bool = False) -> dict[str, Mark]:
        """Return the marks of these groups; a group without an offset is left out.

        If ``settled``, wait until no transaction with an offset for these groups is open or being ended. Brokers before
        4.0 may show a marker only some time after the coordinator says that its commit is complete (KAFKA-17507).
        """
        if not groups:
            return {}
        # else without RequireStable: the next epoch's transaction is often open now, and must not be waited for
        found: dict[str, Mark] = self._cluster.until(deadline, lambda: self._read_once(sorted(groups), settled=settled))
        return found

    def of_partition(self, partition: int, deadline: float) -> int | None:
        """Return the newest epoch applied in a Spark partition; None if there is no offset."""
        return _newest(self.read([marker_group(self._key, partition, parity) for parity in (0, 1)], deadline))

    def settled(self, epoch: int, part: KafkaCommittable, deadline: float) -> int | None:
        """Return the newest epoch in the group of an epoch's part, read as ``settled``; None if there is no offset."""
        return _newest(self.read([self._group(epoch, part)], deadline, settled=True))

    def read_all(self, deadline: float, *, settled: bool = False, besides: LastDone | None = None) -> dict[str, Mark]:
        """Return the marks of all Spark partitions, including those of earlier runs.

        If they are read as ``settled``, those of the epoch ``besides`` are left out: its transactions may be open.
        """
        prefix = marker_group_prefix(self._key)
        listed = self._cluster.until(deadline, self._list_once)
        groups = {name for name in listed if name.startswith(prefix)}
        if settled and besides is not None:
            groups -= self.marks_of(besides).keys()
        return self.read(groups, deadline, settled=settled)

    def unexpired(self, done: LastDone, found: Mapping[str, Mark]) -> LastDone:
        """Return ``done`` without the parts whose marker may have expired (offsets.retention.minutes)."""
        known = list(zip(committables(done), done.parts, strict=True))
        if all(self._group(done.epoch, part) in found for part, _ in known):
            return done
        # a marker that is younger than the retention must still exist
        oldest = time.time() - self.retention()
        # a marker that is there is compared, whatever its age
        kept = [raw for part, raw in known if self._group(done.epoch, part) in found or part.prepared_at > oldest]
        return LastDone(done.epoch, done.attempt, tuple(kept))

    def retention(self) -> float:
        """Return for how many seconds the broker keeps offsets of groups without members."""
        if self._retention is None:
            self._retention = self._ask_retention()
        return self._retention

    def _ask_retention(self) -> float:
        found = self._cluster.broker_setting("offsets.retention.minutes")
        # without the right to ask, assume a day: an expired marker must never count as absent
        return DAY_SECONDS if found is None else 60.0 * int(found)

    def _group(self, epoch: int, part: KafkaCommittable) -> str:
        return marker_group(self._key, part.partition, epoch % 2)

    def _list_once(self) -> list[str]:
        # every broker, because each coordinates some of the groups
        answers = self._cluster.ask_brokers(lambda: ListGroupsRequest(min_version=0))
        for answer in answers:
            raise_for(answer.error_code, "listing groups")
        return [group.group_id for answer in answers for group in answer.groups]

    def _read_once(self, groups: list[str], *, settled: bool) -> dict[str, Mark]:
        answers = self._cluster.ask_coordinators(
            CoordinatorType.GROUP, groups, lambda mine: _offsets_of(mine, settled=settled)
        )
        told = [group for answer in answers for group in answer.groups]
        for group in told:
            raise_for(group.error_code, f"the offsets of group {group.group_id}")
        found = {group.group_id: _newest_mark(group) for group in told}
        return {name: mark for name, mark in found.items() if mark is not None}


def committables(last: LastDone) -> list[KafkaCommittable]:
    """Return the parts of an epoch."""
    return [KafkaCommittable.from_json(part) for part in last.parts]


def topics_of(parts: Iterable[KafkaCommittable]) -> dict[str, str]:
    """Return the ids of the topics that an epoch was written to, by name."""
    return {topic: known for part in parts for topic, known in part.topics.items()}


def _offsets_of(groups: list[str], *, settled: bool) -> OffsetFetchRequest:
    every_topic = [OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None) for group in groups]
    return OffsetFetchRequest(
        groups=every_topic, require_stable=settled, min_version=_SEVERAL_GROUPS, max_version=_SEVERAL_GROUPS
    )


def _newest_mark(group: Any) -> Mark | None:
    kept = [offset for topic in group.topics for offset in topic.partitions]
    for offset in kept:
        raise_for(offset.error_code, f"an offset of group {group.group_id}")
    marks = [Mark(one.committed_offset, one.metadata or "") for one in kept if one.committed_offset >= 0]
    return max(marks, key=lambda mark: mark.epoch, default=None)


def _newest(marks: Mapping[str, Mark]) -> int | None:
    return max((mark.epoch for mark in marks.values()), default=None)
