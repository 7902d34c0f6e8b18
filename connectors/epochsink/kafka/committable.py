"""What names a prepared transaction in the ledger: written by a task, read by any later driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from epochsink.errors import LedgerCorrupt
from epochsink.kafka.topic_id import NO_ID
from epochsink.kafka.transactional_id import Transaction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable

VERSION: Final = 4
"""2 said "slot" no more and named the topics' ids; 3 keeps the markers of even and odd epochs apart; 4 may keep its
rows in the topic."""
_PARITY_SINCE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaCommittable:
    """One open transaction with the rows of one Spark partition.

    ``task`` is the uuid under which the rows are spooled, ``prepared_at`` the time in seconds since 1970. ``topics``
    holds the id of each topic written to, as it was before the first row: a topic that has another one now is another
    topic. It is empty where nobody asked, as in the first version. ``version`` is that of the task which wrote it, and
    says where the marker stands. ``log_from`` tells for each partition of the topic where its log ended before the
    first row: the rows are kept there, from those offsets on. It is empty where they are in the spool, or nowhere.
    """

    transaction: Transaction
    partition: int
    task: str
    rows: int
    prepared_at: int
    topics: Mapping[str, str] = field(default_factory=dict, hash=False)
    log_from: tuple[int, ...] = ()
    version: int = VERSION

    @property
    def has_joint_marker(self) -> bool:
        """Whether the marker is in the group that earlier versions kept for even and odd epochs alike."""
        return self.version < _PARITY_SINCE

    def to_json(self) -> Committable:
        """Return the committable as the ledger keeps it."""
        return {
            # as it was, too, where an older one is taken over: its marker does not move
            "version": max(self.version, 2),
            "transactional_id": self.transaction.transactional_id,
            "producer_id": self.transaction.producer_id,
            "producer_epoch": self.transaction.producer_epoch,
            "partition": self.partition,
            "task": self.task,
            "rows": self.rows,
            "prepared_at": self.prepared_at,
            "topics": dict(self.topics),
            **({"log_from": list(self.log_from)} if self.log_from else {}),
        }

    def recreated(self, now: Mapping[str, str]) -> list[str]:
        """Return the topics that have another id than when the rows were written, or none; ``now`` holds the ids."""
        found = ((topic, was, now.get(topic)) for topic, was in self.topics.items())
        return [topic for topic, was, known in found if known != was and NO_ID not in (was, known)]

    @classmethod
    def from_json(cls, part: Committable) -> Self:
        """Return what ``to_json`` of this version or an older one has written. Raises `LedgerCorrupt`.

        The first version bore no number and said "slot" for the partition.
        """
        version = part.get("version", 1)
        if version not in range(1, VERSION + 1):
            raise LedgerCorrupt(
                f"a Kafka committable of version {version!r} is recorded; this epochsink reads versions 1 to {VERSION}",
                hint="finish the epoch with the newer epochsink that has written it",
            )
        try:
            return cls(
                transaction=Transaction(
                    str(part["transactional_id"]), int(part["producer_id"]), int(part["producer_epoch"])
                ),
                partition=int(part["slot" if version == 1 else "partition"]),
                task=str(part["task"]),
                rows=int(part["rows"]),
                prepared_at=int(part["prepared_at"]),
                topics=dict(part.get("topics", {})),
                log_from=tuple(int(offset) for offset in part.get("log_from", ())),
                version=version,
            )
        except (KeyError, TypeError, ValueError) as failure:
            raise LedgerCorrupt(
                f"a Kafka committable cannot be read, it has the fields {', '.join(sorted(part))}: {failure!r}",
                hint="see 'epochsink status'",
            ) from failure
