"""End, describe and list transactions that other processes began, and judge the transaction coordinator's answers.

Only this module says what these answers mean. A time-out, a lost connection or an unknown answer never means "aborted".
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.errors import RetriableError
from kafka.protocol.admin.transactions import DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest

from epochsink.identity import TransactionalId
from epochsink.kafka import errors
from epochsink.kafka.cluster import raise_for
from epochsink.kafka.committable import Producer
from epochsink.sink import COMMITTED, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import Transaction

log = logging.getLogger("epochsink.kafka")

_ID_NOT_FOUND = 105
_NONE = 0
_CONCURRENT_TRANSACTIONS = 51
_USED_AGAIN: Final = frozenset({47, 90})
"""InitProducerId's codes (by its version) if the producer that the request names has the id no more."""


_NEWEST_END_TXN = 4
"""The last version of EndTxn for transactions of the older protocol, which librdkafka uses.

Brokers accept it at every level of transaction.version. Version 5 is for the protocol of level 2, and brokers offer it
at every level: below level 2 it can leave a transaction open, beyond every timeout, until the broker restarts
(docs/explanation/decisions.md).
"""

_NEWEST_INIT_PRODUCER_ID = 4
"""Later versions are for the protocol of level 2."""
_NAMES_PRODUCER = 3
"""The first version of InitProducerId that names the producer which had the id."""
_NO_TRANSACTION_MS = 1000
"""The timeout for ids under which no transaction is begun: below any broker's limit."""


class Answer(enum.Enum):
    """What to do after an answer to EndTxn."""

    DECIDED = "the coordinator has stored the decision"
    AGAIN = "not carried out, or not finished: send the same request again"
    ASK = "the transaction is not open under this producer epoch: its description and the marker say why"
    REFUSED = "an operator has to change a right or a setting first"


END_TRANSACTION: Final[dict[int, tuple[Answer, str]]] = {
    -1: (Answer.AGAIN, "UNKNOWN_SERVER_ERROR"),
    0: (Answer.DECIDED, "NONE"),
    7: (Answer.AGAIN, "REQUEST_TIMED_OUT"),
    14: (Answer.AGAIN, "COORDINATOR_LOAD_IN_PROGRESS"),
    15: (Answer.AGAIN, "COORDINATOR_NOT_AVAILABLE"),
    16: (Answer.AGAIN, "NOT_COORDINATOR"),
    31: (Answer.REFUSED, "CLUSTER_AUTHORIZATION_FAILED"),
    35: (Answer.REFUSED, "UNSUPPORTED_VERSION"),
    47: (Answer.ASK, "INVALID_PRODUCER_EPOCH"),  # timed out and aborted, or committed and used again
    48: (Answer.ASK, "INVALID_TXN_STATE"),  # ended the other way
    49: (Answer.ASK, "INVALID_PRODUCER_ID_MAPPING"),  # the id has expired, or got a new producer id
    51: (Answer.AGAIN, "CONCURRENT_TRANSACTIONS"),
    53: (Answer.REFUSED, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    89: (Answer.AGAIN, "THROTTLING_QUOTA_EXCEEDED"),
    90: (Answer.ASK, "PRODUCER_FENCED"),
    105: (Answer.ASK, "TRANSACTIONAL_ID_NOT_FOUND"),
    120: (Answer.ASK, "TRANSACTION_ABORTABLE"),
}
"""Error code of EndTxn -> (what to do, its name in Kafka's protocol)."""


def answer_to(code: int) -> tuple[Answer, str]:
    """Return what to do about an error code of EndTxn; an unknown code needs an operator."""
    return END_TRANSACTION.get(code, (Answer.REFUSED, f"error code {code}"))


class State(enum.Enum):
    """The states of a transactional id, as DescribeTransactions names them, and one for an unknown id."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"
    DEAD = "Dead"
    NOT_FOUND = "not found"


ENDING: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT, State.PREPARE_EPOCH_FENCE})
"""States after the decision, while the ends are still being written to the partitions."""


class Description(NamedTuple):
    """A coordinator's description of a transactional id."""

    state: State
    producer_id: int = -1
    producer_epoch: int = -1
    begun_ms: int = 0
    """When the transaction began, in milliseconds since 1970."""
    timeout_ms: int = 0
    """The brokers abort it after this many milliseconds."""
    partitions: Sequence[tuple[str, int]] = ()
    """Where it has records; the internal topic of its marker's group is among them."""

    def is_of(self, transaction: Transaction) -> bool:
        """Whether the id's newest producer is the producer of this transaction."""
        return (self.producer_id, self.producer_epoch) == transaction.producer


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
    if now.state in ENDING or (mine and now.state is State.ONGOING):
        return None
    if marker is not None and marker >= epoch:
        return COMMITTED
    if now.state is State.COMPLETE_COMMIT:
        # the marker becomes visible just after the commit; if it stays absent, it was deleted
        return COMMITTED if mine else None
    evidence = (
        f"transactional id {transaction.transactional_id} is {now.state.value} (producer {now.producer_id}, epoch "
        f"{now.producer_epoch}; prepared as producer {transaction.producer_id}, epoch {transaction.producer_epoch}), "
        f"and the newest epoch applied in its Spark partition is {marker}"
    )
    # without a marker, "never committed" and "committed long ago" look the same: do not conclude "aborted"
    if marker is None and (marker_may_be_gone or now.state is State.NOT_FOUND):
        return Verdict(
            Outcome.UNKNOWN,
            f"{evidence}, which may be because the offset has expired (offsets.retention.minutes) or was deleted",
        )
    return Verdict(Outcome.ABORTED, evidence)


class Transactions:
    """The transactions of one cluster. Every method retries passing failures; raises `Unreachable`, `Refused`.

    Deadlines are monotonic seconds.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def end(self, transaction: Transaction, deadline: float, *, commit: bool) -> tuple[Answer, str]:
        """Commit or abort; return the coordinator's answer, never AGAIN, and its name; after REFUSED also a hint."""

        def attempt() -> tuple[Answer, str]:
            code = self._end_once(transaction, commit=commit)
            answer, name = answer_to(code)
            if answer is Answer.AGAIN:
                raise RetriableError(f"EndTxn for {transaction.transactional_id}: {name}")
            return answer, f"{name}; {errors.hint(code)}" if answer is Answer.REFUSED else name

        found: tuple[Answer, str] = self._cluster.until(deadline, attempt)
        return found

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
            requests = {name: _init_producer_id(name, each) for name, each in left.items()}
            answers = self._cluster.ask_each(CoordinatorType.TRANSACTION, requests)
            for name, answer in answers.items():
                if answer.error_code == _NONE or answer.error_code in _USED_AGAIN:
                    del left[name]
                elif answer.error_code != _CONCURRENT_TRANSACTIONS:
                    raise_for(answer.error_code, f"fencing off {name}")
            # this is the answer if the abort is stored, but also if the producer was just adding a partition
            now = self._describe_once([name for name in left if name in answers])
            for name, told in now.items():
                if not _is_left_open(left[name], told):
                    del left[name]
            if left:
                raise RetriableError(f"not fenced off yet: {', '.join(left)}")

        if left:
            self._cluster.until(deadline, attempt)

    def commit_many(self, transactions: Sequence[Transaction], deadline: float) -> set[Transaction]:
        """Commit transactions without waiting for each answer; return those that the coordinator has decided.

        The outcome of the others is unknown: call `end` for each, which says what is wrong.
        """
        requests = {each.transactional_id: _end_txn(each, commit=True) for each in transactions}
        answers = self._cluster.until(deadline, lambda: self._cluster.ask_each(CoordinatorType.TRANSACTION, requests))
        decided = {name for name, answer in answers.items() if answer_to(answer.error_code)[0] is Answer.DECIDED}
        return {each for each in transactions if each.transactional_id in decided}

    def describe(self, ids: Iterable[str], deadline: float) -> dict[str, Description]:
        """Return the state of each transactional id."""
        wanted = list(ids)
        found: dict[str, Description] = self._cluster.until(deadline, lambda: self._describe_once(wanted))
        return found

    def initialise(self, name: str, deadline: float) -> Producer:
        """Initialise a transactional id, as a producer does; return its new producer."""

        def attempt() -> Producer:
            request = _init_producer_id(name, None)
            [answer] = self._cluster.ask_coordinators(CoordinatorType.TRANSACTION, [name], lambda _: request)
            raise_for(answer.error_code, f"taking {name}")
            return Producer(answer.producer_id, answer.producer_epoch)

        found: Producer = self._cluster.until(deadline, attempt)
        return found

    def open_ids(self, prefix: str, deadline: float) -> list[str]:
        """Return the transactional ids with this prefix whose transaction is open, on any broker."""
        return self.ids(prefix, (State.ONGOING,), deadline)

    def ids(self, prefix: str, states: Sequence[State], deadline: float) -> list[str]:
        """Return the transactional ids with this prefix that are in one of these states, on any broker."""
        listed = self._cluster.until(deadline, lambda: self._list_once(states))
        return sorted(each.transactional_id for each in listed if each.transactional_id.startswith(prefix))

    def unended(self, producer_ids: Collection[int], deadline: float) -> set[int]:
        """Return which of these producers a coordinator lists with a transaction that is open or being ended."""
        states = (State.ONGOING, *ENDING)
        return {
            each.producer_id for each in self._cluster.until(deadline, lambda: self._list_once(states, producer_ids))
        }

    def newest_generation(self, key: str, deadline: float) -> int:
        """Return the highest generation in the transactional ids of an identity; 0 if there are none."""
        ids = self.ids(TransactionalId.prefix(key), (), deadline)
        return max((known.generation for known in map(TransactionalId.parse, ids) if known), default=0)

    def _list_once(self, states: Sequence[State], producer_ids: Collection[int] = ()) -> list[Any]:
        names, ids = [state.value for state in states], sorted(producer_ids)
        # every broker, because each coordinates some of the ids
        answers = self._cluster.ask_brokers(
            lambda: ListTransactionsRequest(state_filters=names, producer_id_filters=ids, min_version=0)
        )
        for answer in answers:
            raise_for(answer.error_code, "listing transactions")
        return [each for answer in answers for each in answer.transaction_states]

    def _end_once(self, transaction: Transaction, *, commit: bool) -> int:
        name, request = transaction.transactional_id, _end_txn(transaction, commit=commit)
        [answer] = self._cluster.ask_coordinators(CoordinatorType.TRANSACTION, [name], lambda _: request)
        return int(answer.error_code)

    def _describe_once(self, ids: list[str]) -> dict[str, Description]:
        answers = self._cluster.ask_coordinators(
            CoordinatorType.TRANSACTION, ids, lambda mine: DescribeTransactionsRequest(transactional_ids=mine)
        )
        found: dict[str, Description] = {}
        for answer in answers:
            for told in answer.transaction_states:
                if told.error_code == _ID_NOT_FOUND:
                    found[told.transactional_id] = Description(State.NOT_FOUND)
                    continue
                raise_for(told.error_code, f"describing {told.transactional_id}")
                found[told.transactional_id] = Description(
                    State(told.transaction_state),
                    told.producer_id,
                    told.producer_epoch,
                    told.transaction_start_time_ms,
                    told.transaction_timeout_ms,
                    [(at.topic, number) for at in told.topics for number in at.partitions],
                )
        return found


def _is_left_open(transaction: Transaction, now: Description) -> bool:
    """Whether a transaction that was to be fenced off is open."""
    # with the raised epoch too: the coordinator raises it first, and may fail to store the abort
    raised = now.producer_epoch - transaction.producer_epoch
    return now.state is State.ONGOING and now.producer_id == transaction.producer_id and raised in (0, 1)


def _init_producer_id(name: str, had: Transaction | None) -> InitProducerIdRequest:
    """Return the request for a new producer epoch; ``had`` is the producer that must have the id, None for any."""
    request = InitProducerIdRequest(
        transactional_id=name,
        transaction_timeout_ms=_NO_TRANSACTION_MS,
        min_version=_NAMES_PRODUCER,
        max_version=_NEWEST_INIT_PRODUCER_ID,
    )
    if had is not None:
        request.producer_id, request.producer_epoch = had.producer
    return request


def _end_txn(transaction: Transaction, *, commit: bool) -> EndTxnRequest:
    return EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        committed=commit,
        max_version=_NEWEST_END_TXN,
    )
