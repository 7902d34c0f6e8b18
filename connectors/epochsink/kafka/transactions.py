"""End, describe and list transactions that other processes began, and judge the transaction coordinator's answers.

Only this module says what these answers mean. A time-out, a lost connection or an unknown answer never means "aborted".
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from kafka.errors import RetriableError

from epochsink.identity import TransactionalId
from epochsink.kafka import errors
from epochsink.kafka.committable import Producer, Transaction
from epochsink.kafka.server import Description, KafkaServer, ListedTransaction, TransactionState, raise_for
from epochsink.sink import COMMITTED, Outcome, Verdict

log = logging.getLogger("epochsink.kafka")

_NONE = 0
_CONCURRENT_TRANSACTIONS = 51
_USED_AGAIN: Final = frozenset({47, 90})
"""InitProducerId's codes (by its version) if the producer that the request names has the id no more."""


class EndTxnResult(enum.Enum):
    """What to do after an answer to EndTxn."""

    DECIDED = "the coordinator has stored the decision"
    AGAIN = "not carried out, or not finished: send the same request again"
    ASK = "the transaction is not open under this producer epoch: its description and the marker say why"
    REFUSED = "an operator has to change a right or a setting first"


END_TRANSACTION: Final[dict[int, tuple[EndTxnResult, str]]] = {
    -1: (EndTxnResult.AGAIN, "UNKNOWN_SERVER_ERROR"),
    0: (EndTxnResult.DECIDED, "NONE"),
    7: (EndTxnResult.AGAIN, "REQUEST_TIMED_OUT"),
    14: (EndTxnResult.AGAIN, "COORDINATOR_LOAD_IN_PROGRESS"),
    15: (EndTxnResult.AGAIN, "COORDINATOR_NOT_AVAILABLE"),
    16: (EndTxnResult.AGAIN, "NOT_COORDINATOR"),
    31: (EndTxnResult.REFUSED, "CLUSTER_AUTHORIZATION_FAILED"),
    35: (EndTxnResult.REFUSED, "UNSUPPORTED_VERSION"),
    47: (EndTxnResult.ASK, "INVALID_PRODUCER_EPOCH"),  # timed out and aborted, or committed and used again
    48: (EndTxnResult.ASK, "INVALID_TXN_STATE"),  # ended the other way
    49: (EndTxnResult.ASK, "INVALID_PRODUCER_ID_MAPPING"),  # the id has expired, or got a new producer id
    51: (EndTxnResult.AGAIN, "CONCURRENT_TRANSACTIONS"),
    53: (EndTxnResult.REFUSED, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    89: (EndTxnResult.AGAIN, "THROTTLING_QUOTA_EXCEEDED"),
    90: (EndTxnResult.ASK, "PRODUCER_FENCED"),
    105: (EndTxnResult.ASK, "TRANSACTIONAL_ID_NOT_FOUND"),
    120: (EndTxnResult.ASK, "TRANSACTION_ABORTABLE"),
}
"""Error code of EndTxn -> (what to do, its name in Kafka's protocol)."""


def answer_to(code: int) -> tuple[EndTxnResult, str]:
    """Return what to do about an error code of EndTxn; an unknown code needs an operator."""
    return END_TRANSACTION.get(code, (EndTxnResult.REFUSED, f"error code {code}"))


ENDING: Final = frozenset(
    {TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE}
)
"""States after the decision, while the ends are still being written to the partitions."""


def verdict_on(
    transaction: Transaction, now: Description, *, epoch: int, marker: int | None, marker_may_be_gone: bool
) -> Verdict | None:
    """Return the verdict on a transaction that EndTxn could not commit; None if it is not known yet.

    ``marker`` is the newest epoch that the Spark partition's groups show as applied, read after ``now``. The marker
    proves a commit, because it became visible together with the transaction. The id does not, because other attempts
    use it again.
    """
    mine = now.is_of(transaction)
    # open, or decided but not yet written to the partitions: the marker may still appear
    if now.state in ENDING or (mine and now.state is TransactionState.ONGOING):
        return None
    if marker is not None and marker >= epoch:
        return COMMITTED
    if now.state is TransactionState.COMPLETE_COMMIT:
        # the marker becomes visible just after the commit; if it stays absent, it was deleted
        return COMMITTED if mine else None
    evidence = (
        f"transactional id {transaction.transactional_id} is {now.state.value} (producer {now.producer_id}, epoch "
        f"{now.producer_epoch}; prepared as producer {transaction.producer_id}, epoch {transaction.producer_epoch}), "
        f"and the newest epoch applied in its Spark partition is {marker}"
    )
    # without a marker, "never committed" and "committed long ago" look the same: do not conclude "aborted"
    if marker is None and (marker_may_be_gone or now.state is TransactionState.NOT_FOUND):
        return Verdict(
            Outcome.UNKNOWN,
            f"{evidence}, which may be because the offset has expired (offsets.retention.minutes) or was deleted",
        )
    return Verdict(Outcome.ABORTED, evidence)


class Transactions:
    """The transactions of one cluster. Every method retries passing failures; raises `Unreachable`, `Refused`.

    Deadlines are monotonic seconds.
    """

    def __init__(self, cluster: KafkaServer) -> None:
        self._cluster = cluster

    def end(self, transaction: Transaction, deadline: float, *, commit: bool) -> tuple[EndTxnResult, str]:
        """Commit or abort; return the coordinator's answer, never AGAIN, and its name; after REFUSED also a hint."""

        def attempt() -> tuple[EndTxnResult, str]:
            code = self._cluster.end_transaction(transaction, commit=commit)
            answer, name = answer_to(code)
            if answer is EndTxnResult.AGAIN:
                raise RetriableError(f"EndTxn for {transaction.transactional_id}: {name}")
            return answer, f"{name}; {errors.hint(code)}" if answer is EndTxnResult.REFUSED else name

        outcome: tuple[EndTxnResult, str] = self._cluster.until(deadline, attempt)
        return outcome

    def give_up(self, transaction: Transaction, *, answered: bool = True) -> None:
        """Abort a transaction of this driver that will not be recorded. If that fails, a later sweep aborts it.

        ``answered`` says that every request to write into it was answered, so that nothing comes after the end.
        """
        deadline = self._cluster.deadline()
        try:
            if answered:
                self.end(transaction, deadline, commit=False)
            else:
                self.fence_off([transaction], deadline)
        except (errors.Unreachable, errors.Refused) as failure:
            log.warning("%s will be aborted by the next sweep: %s", transaction.transactional_id, failure)

    def fence_off(self, transactions: Sequence[Transaction], deadline: float) -> None:
        """Abort open transactions whose producers may still run, so that partitions refuse all that comes later.

        By InitProducerId, as a producer's successor does: it ends the transaction with a raised producer epoch. EndTxn
        leaves the epoch as it is. A batch that a living task sends after that end would open a transaction that no
        coordinator knows, if the brokers do not ask the coordinator (before 3.6, and by a setting).

        Does not wait until the partitions have the ends. A transaction that has ended meanwhile is left as it is.
        """
        left = {each.transactional_id: each for each in transactions}

        def attempt() -> None:
            answers = self._cluster.fence_producers(list(left.values()))
            for name, code in answers.items():
                if code == _NONE or code in _USED_AGAIN:
                    del left[name]
                elif code != _CONCURRENT_TRANSACTIONS:
                    raise_for(code, f"fencing off {name}")
            # this is the answer if the abort is stored, but also if the producer was just adding a partition
            now = self._cluster.describe_transactions([name for name in left if name in answers])
            for name, description in now.items():
                if not _is_left_open(left[name], description):
                    del left[name]
            if left:
                raise RetriableError(f"not fenced off yet: {', '.join(left)}")

        if left:
            self._cluster.until(deadline, attempt)

    def commit_many(self, transactions: Sequence[Transaction], deadline: float) -> set[Transaction]:
        """Commit transactions without waiting for each answer; return those that the coordinator has decided.

        The outcome of the others is unknown: call `end` for each, which says what is wrong.
        """
        codes = self._cluster.until(deadline, lambda: self._cluster.commit_transactions(transactions))
        decided = {name for name, code in codes.items() if answer_to(code)[0] is EndTxnResult.DECIDED}
        return {each for each in transactions if each.transactional_id in decided}

    def describe(self, ids: Iterable[str], deadline: float) -> dict[str, Description]:
        """Return the state of each transactional id."""
        wanted = list(ids)
        descriptions: dict[str, Description] = self._cluster.until(
            deadline, lambda: self._cluster.describe_transactions(wanted)
        )
        return descriptions

    def initialise(self, name: str, deadline: float) -> Producer:
        """Initialise a transactional id, as a producer does; return its new producer."""
        producer: Producer = self._cluster.until(deadline, lambda: self._cluster.initialise_producer(name))
        return producer

    def open_ids(self, prefix: str, deadline: float) -> list[str]:
        """Return the transactional ids with this prefix whose transaction is open, on any broker."""
        return self.ids(prefix, (TransactionState.ONGOING,), deadline)

    def ids(self, prefix: str, states: Sequence[TransactionState], deadline: float) -> list[str]:
        """Return the transactional ids with this prefix that are in one of these states, on any broker."""
        listed = self._listed(states, (), deadline)
        return sorted(each.transactional_id for each in listed if each.transactional_id.startswith(prefix))

    def unended(self, producer_ids: Collection[int], deadline: float) -> set[int]:
        """Return which of these producers a coordinator lists with a transaction that is open or being ended."""
        states = (TransactionState.ONGOING, *ENDING)
        return {each.producer_id for each in self._listed(states, producer_ids, deadline)}

    def newest_generation(self, key: str, deadline: float) -> int:
        """Return the highest generation in the transactional ids of an identity; 0 if there are none."""
        ids = self.ids(TransactionalId.prefix(key), (), deadline)
        return max((known.generation for known in map(TransactionalId.parse, ids) if known), default=0)

    def _listed(
        self, states: Sequence[TransactionState], producer_ids: Collection[int], deadline: float
    ) -> list[ListedTransaction]:
        listed: list[ListedTransaction] = self._cluster.until(
            deadline, lambda: self._cluster.list_transactions(states, producer_ids)
        )
        return listed


def _is_left_open(transaction: Transaction, now: Description) -> bool:
    """Whether a transaction that was to be fenced off is open."""
    # with the raised epoch too: the coordinator raises it first, and may fail to store the abort
    raised = now.producer_epoch - transaction.producer_epoch
    return now.state is TransactionState.ONGOING and now.producer_id == transaction.producer_id and raised in (0, 1)
