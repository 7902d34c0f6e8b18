"""The newest epoch applied, as each transaction itself has recorded it: one consumer group for each Spark partition.

The offset that a transaction commits into its partition's group is its epoch. It becomes visible with the rows or not
at all. Offsets may lie on any topic that the Spark partition has written to; the largest one counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.identity import marker_group
from epochsink.sink import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from epochsink.kafka.cluster import Cluster

DAY_SECONDS = 86_400


class Markers:
    """The markers of one identity; ``key`` is its `identity_key`. Every method raises `Unreachable`, `Refused`."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster = cluster
        self._key = key
        self._retention: float | None = None

    def of_partition(self, partition: int, deadline: float) -> int | None:
        """Return the newest epoch applied in a Spark partition; None if no offset is kept."""
        return self._newest_of([marker_group(self._key, partition)], deadline)

    def of_partitions(self, partitions: Iterable[int], deadline: float) -> dict[str, Mark]:
        """Return the newest epoch applied in each of some Spark partitions; none where no offset is kept."""
        groups = {marker_group(self._key, partition): str(partition) for partition in partitions}
        if not groups:
            return {}
        found = self._cluster.until(deadline, lambda: self._cluster.admin().list_group_offsets(list(groups)))
        marks = {}
        for group, kept in found.items():
            newest = max((one for one in kept.values() if one.offset >= 0), key=lambda one: one.offset, default=None)
            if newest is not None:
                marks[groups[group]] = Mark(newest.offset, newest.metadata or "")
        return marks

    def newest(self, deadline: float) -> int | None:
        """Return the newest epoch applied in any Spark partition, also in those that later runs no longer have."""
        prefix = marker_group(self._key, 0).removesuffix("0")
        groups = self._cluster.until(deadline, lambda: self._cluster.admin().list_groups())
        mine = sorted({group["group_id"] for group in groups if group["group_id"].startswith(prefix)})
        return self._newest_of(mine, deadline) if mine else None

    def retention(self) -> float:
        """Return for how long (seconds) the broker keeps offsets of groups without members."""
        if self._retention is None:
            self._retention = self._ask_retention()
        return self._retention

    def _ask_retention(self) -> float:
        found = self._cluster.broker_setting("offsets.retention.minutes")
        # not allowed to ask: believe in no more than a day, so that "expired" is never taken for "absent"
        return DAY_SECONDS if found is None else 60.0 * int(found)

    def _newest_of(self, groups: list[str], deadline: float) -> int | None:
        # the offsets of open transactions are left out, and do not block: the next epoch's is often open now
        found = self._cluster.until(deadline, lambda: self._cluster.admin().list_group_offsets(groups))
        offsets = [kept.offset for partitions in found.values() for kept in partitions.values()]
        return max((offset for offset in offsets if offset >= 0), default=None)
