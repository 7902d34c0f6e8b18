"""What an operator asks of a Kafka sink."""
# ruff: noqa: ARG002 - a participant has one sink

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from epochsink.identity import TransactionalId
from epochsink.kafka import preflight
from epochsink.kafka.audit import audit
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.letters import KafkaLetters
from epochsink.kafka.remnants import open_transactions
from epochsink.kafka.repair import KafkaLosses, LogRepair
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.transactions import Transactions
from epochsink.sink import (
    Comparison,
    Finding,
    Letters,
    Operator,
    Participant,
    Receipt,
    Remnant,
    identity_key,
)


class KafkaOperator(Operator):
    """Answers an operator's commands for one Kafka sink. ``log_repair`` makes a search, after `Participant.open`."""

    def __init__(
        self, participant: Participant, config: KafkaConfig, cluster: KafkaServer, log_repair: Callable[[], LogRepair]
    ) -> None:
        self._marks = participant.marks
        self._identities = participant.identities
        self._config = config
        self._cluster = cluster
        self._log_repair = log_repair

    def examine(self, sink: str) -> Iterator[Finding]:
        """Look at the cluster; see `epochsink.kafka.preflight`."""
        return preflight.examine(self._config, self._cluster)

    def pending(self) -> list[Remnant]:
        """Return the open transactions of this identity."""
        (identity,) = self._identities.values()
        prefix = TransactionalId.prefix(identity_key(identity))
        return open_transactions(Transactions(self._cluster), prefix, self._cluster.deadline())

    def audit(self, sink: str, receipts: Sequence[Receipt], newest: int) -> Sequence[Comparison]:
        """Count each transaction's records; see `epochsink.kafka.audit`."""
        return audit(self._cluster, receipts)

    def letters(self, sink: str) -> Letters | None:
        """Return the dead letters in the topic; see `epochsink.kafka.letters`."""
        topic = self._config.letters_topic
        return None if topic is None else KafkaLetters(self._config, self._cluster, self._identities[sink], topic)

    def losses(self) -> KafkaLosses:
        """Return a search by markers and log; see `epochsink.kafka.repair`."""
        return KafkaLosses(self._marks, self._config.topic, self._log_repair)
