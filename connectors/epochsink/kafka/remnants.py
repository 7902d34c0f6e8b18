"""Find and abort open transactions of all sinks in a cluster, for an operator without the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochsink.identity import PREFIX, TransactionalId
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Transaction
from epochsink.kafka.server import Description, TransactionState
from epochsink.kafka.transactions import Transactions
from epochsink.sink import Remnant

OPEN: Final = "open transaction"
_SECONDS: Final = 30.0


class Brokers:
    """One cluster, for an operator. Raises `EpochsinkError` if it cannot be reached or refuses a request."""

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str]) -> None:
        self._cluster = Cluster(bootstrap_servers, options, _SECONDS)
        self._transactions = Transactions(self._cluster)

    def remnants(self) -> list[Remnant]:
        """Return the open transactions of every sink, oldest first."""
        return open_transactions(self._transactions, f"{PREFIX}.", self._cluster.deadline())

    def end(self, remnant: Remnant) -> None:
        """Abort a transaction. Its rows never become visible."""
        deadline = self._cluster.deadline()
        now = self._transactions.describe([remnant.name], deadline)[remnant.name]
        # asked again: while the operator decided, the transaction may have ended
        if now.state is TransactionState.ONGOING:
            transaction = Transaction(remnant.name, now.producer_id, now.producer_epoch)
            self._transactions.fence_off([transaction], deadline)

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()


def open_transactions(transactions: Transactions, prefix: str, deadline: float) -> list[Remnant]:
    """Return the open transactions whose ids have a prefix, oldest first. Raises `Unreachable`, `Refused`."""
    names = transactions.open_ids(prefix, deadline)
    described = transactions.describe(names, deadline) if names else {}
    remnants = (_remnant(text, now) for text, now in described.items() if now.state is TransactionState.ONGOING)
    return sorted((one for one in remnants if one is not None), key=lambda one: one.since or 0)


def _remnant(text: str, now: Description) -> Remnant | None:
    name = TransactionalId.parse(text)
    if name is None:
        return None
    return Remnant(
        kind=OPEN,
        name=text,
        key=name.key,
        label=name.label,
        generation=name.generation,
        since=now.begun_ms / 1000,
        owner=f"producer {now.producer_id}, aborted after {now.timeout_ms // 1000} s",
        # not the internal topic of the marker's group: nobody else reads that group
        holds=tuple(sorted(f"{topic}-{number}" for topic, number in now.partitions if not topic.startswith("__"))),
    )
