"""Find the open transactions of all sinks in a cluster, without a checkpoint, for an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kafka.errors import TransactionalIdNotFoundError

from epochsink.identity import PREFIX, Remnant, TransactionalId
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Transaction
from epochsink.kafka.transactions import State, Transactions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

OPEN: Final = "open transaction"
_SECONDS: Final = 30.0


class Brokers:
    """One cluster, for an operator. Raises `EpochsinkError` if it cannot be reached or refuses."""

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str]) -> None:
        self._cluster = Cluster(bootstrap_servers, options, _SECONDS)
        self._transactions = Transactions(self._cluster)

    def remnants(self) -> list[Remnant]:
        """Return the open transactions of every sink, oldest first."""
        deadline = self._cluster.deadline()
        names = self._transactions.open_ids(f"{PREFIX}.", deadline)
        parsed = ((name, TransactionalId.parse(name)) for name in names)
        found = [self._remnant(text, name) for text, name in parsed if name is not None]
        return sorted((one for one in found if one is not None), key=lambda one: one.since or 0)

    def end(self, remnant: Remnant) -> None:
        """Abort a transaction: its rows are gone then."""
        deadline = self._cluster.deadline()
        now = self._transactions.describe([remnant.name], deadline)[remnant.name]
        # asked again: the operator may have taken a while to answer, and the id may be in use again
        if now.state is State.ONGOING:
            transaction = Transaction(remnant.name, now.producer_id, now.producer_epoch)
            self._transactions.end(transaction, deadline, commit=False)

    def close(self) -> None:
        """Release the connections."""
        self._cluster.close()

    def _remnant(self, text: str, name: TransactionalId) -> Remnant | None:
        told = self._described(text)
        if told is None or told.state.value != State.ONGOING.value:
            return None
        return Remnant(
            kind=OPEN,
            name=text,
            key=name.key,
            label=name.label,
            generation=name.generation,
            since=told.transaction_start_time_ms / 1000,
            owner=f"producer {told.producer_id}, aborted after {told.transaction_timeout_ms // 1000} s",
            # a transaction's own group, which bears its marker, has no other readers
            holds=tuple(sorted(f"{at.topic}-{at.partition}" for at in told.topic_partitions if at.topic[:2] != "__")),
        )

    def _described(self, text: str) -> Any:
        """Return the coordinator's description of a transactional id, None if it has forgotten the id."""

        def attempt() -> Any:
            try:
                return self._cluster.admin().describe_transactions([text])[text]
            except TransactionalIdNotFoundError:
                return None

        return self._cluster.until(self._cluster.deadline(), attempt)
