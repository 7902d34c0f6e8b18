"""Try a transaction before the first row is written: begin it as a task does, and end it as the driver does."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Final

from epochsink.errors import ConfigurationError
from epochsink.identity import PREFIX
from epochsink.kafka import errors
from epochsink.kafka.committable import Transaction
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.producer import TransactionalProducer
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.transactions import ENDING, EndTxnResult, Transactions
from epochsink.retry import retrying

_NAME: Final = f"{PREFIX}.check"
_IDS: Final = 16
"""Few, because brokers remember each id for days; several, because checks may run at the same time."""

_ATTEMPTS: Final = 3
_SHORTEST_MS: Final = 1_000
"""The shortest transaction timeout that librdkafka and brokers allow."""
_TIMEOUT_MS: Final = 10_000
_COMPARED_WITH_TIMEOUT: Final = frozenset({"message.timeout.ms", "socket.timeout.ms"})
_LOOK_AGAIN_SECONDS: Final = 0.02


def beginning(config: KafkaConfig) -> list[str]:
    """Connect with the producing client, and get a producer id under our prefix; return what failed."""
    try:
        _begun(config, _SHORTEST_MS).release()
    except ConfigurationError as wrong:
        return [_finding(wrong)]
    except NativeError as failure:
        refused = errors.error(failure, f"no transaction could be begun at {config.bootstrap_servers}")
        return [f"{refused.message}; {refused.hint}"]
    return []


def settings(config: KafkaConfig, transaction_timeout_ms: int) -> list[str]:
    """Let the producing client compare its options with the tasks' transaction timeout. Does not connect."""
    try:
        _producer(config, config.options, transaction_timeout_ms).release()
    except ConfigurationError as wrong:
        return [_finding(wrong)]
    return []


def ending(config: KafkaConfig, cluster: KafkaServer, topic: str, cap: float | None) -> list[str]:
    """Add an offset to a transaction, leave it open, and end it with the driver's client; return what failed.

    ``cap`` is the longest transaction timeout that the brokers allow, in seconds; None if it is not known.
    """
    try:
        transaction = _open_one(config, topic, cap)
    except NativeError as failure:
        refused = errors.error(failure, f"an offset on topic '{topic}' could not be put into a transaction")
        return [f"{refused.message}; {refused.hint}"]
    return _ended(Transactions(cluster), transaction, cluster.deadline())


def clock_ahead(config: KafkaConfig, cluster: KafkaServer, topic: str, cap: float | None) -> float:
    """Return how many seconds the coordinator's clock is ahead of this machine's; after `ending` has found nothing.

    A coordinator tells its time only by when a transaction began. The answer is off by as long as a beginning takes.
    """
    before = time.time()
    transaction = _open_one(config, topic, cap)
    middle = (before + time.time()) / 2
    transactions, deadline = Transactions(cluster), cluster.deadline()
    begun_ms = transactions.describe([transaction.transactional_id], deadline)[transaction.transactional_id].begun_ms
    transactions.give_up(transaction)
    return begun_ms / 1000 - middle


def _open_one(config: KafkaConfig, topic: str, cap: float | None) -> Transaction:
    # another check may use the same id at the same time
    policy = retrying(_is_fenced, attempts=_ATTEMPTS)
    timeout_ms = _TIMEOUT_MS if cap is None else min(_TIMEOUT_MS, round(1000 * cap))
    opened: Transaction = policy(lambda: _left_open(config, topic, timeout_ms))
    return opened


def _finding(wrong: ConfigurationError) -> str:
    return f"{wrong.message}; {wrong.hint or 'correct options='}"


def _left_open(config: KafkaConfig, topic: str, timeout_ms: int) -> Transaction:
    trial = _begun(config, timeout_ms)
    try:
        # with an offset, because EndTxn refuses an empty transaction
        trial.mark(_NAME, topic, 0)
        return Transaction(trial.transactional_id, *trial.identity())
    finally:
        trial.release()


def _ended(transactions: Transactions, transaction: Transaction, deadline: float) -> list[str]:
    name = transaction.transactional_id
    answer, detail = transactions.end(transaction, deadline, commit=False)
    if answer is EndTxnResult.REFUSED:
        return [f"the coordinator refuses to end transaction {name}: {detail}"]
    # the answer is not proof: some clusters accept the request and leave the transaction open
    while transactions.describe([name], deadline)[name].state in ENDING:
        if time.monotonic() >= deadline:
            finding = (
                f"the coordinator has accepted the end of transaction {name} and does not carry it out: readers would "
                "never get past an epoch; see the broker's log and the cluster's feature transaction.version"
            )
            return [finding]
        time.sleep(_LOOK_AGAIN_SECONDS)
    return []


def _begun(config: KafkaConfig, timeout_ms: int) -> TransactionalProducer:
    # without the options that the client compares with the timeout: this timeout is not the tasks' timeout
    options = {name: value for name, value in config.options.items() if name not in _COMPARED_WITH_TIMEOUT}
    trial = _producer(config, options, timeout_ms)
    try:
        trial.begin()
    except BaseException:
        trial.release()
        raise
    return trial


def _producer(config: KafkaConfig, options: Mapping[str, str], transaction_timeout_ms: int) -> TransactionalProducer:
    name = f"{_NAME}.{uuid.uuid4().int % _IDS}"
    return TransactionalProducer(options, name, transaction_timeout_ms, config.timeout, config.bootstrap_servers)


def _is_fenced(failure: BaseException) -> bool:
    """Whether another check uses the same id."""
    return isinstance(failure, NativeError) and failure.code in errors.FENCED
