"""What the transaction coordinator's answers mean. The two tables here are the only place that says so.

A time-out, a lost connection or an answer that is not in the table never means "aborted".
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from epochsink.sink import COMMITTED, Outcome, Verdict

if TYPE_CHECKING:
    from epochsink.kafka.transactional_id import Transaction


class Answer(enum.Enum):
    """What to do after an answer to EndTxn."""

    DECIDED = "the coordinator has written the decision down"
    AGAIN = "not carried out, or still going on: send the same request again"
    ASK = "the transaction is not open under this epoch: its description and the marker tell why"
    REFUSED = "somebody has to change a right or a setting first"


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
    """Return what an error code of EndTxn calls for; an unknown one calls for an operator."""
    return END_TRANSACTION.get(code, (Answer.REFUSED, f"error code {code}"))


class State(enum.Enum):
    """States of a transactional id, as DescribeTransactions names them, and one for "no such id"."""

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
"""Decided; the markers of the decision are still being written to the partitions."""


class Description(NamedTuple):
    """What a coordinator says about a transactional id now."""

    state: State
    producer_id: int = -1
    producer_epoch: int = -1

    def is_of(self, transaction: Transaction) -> bool:
        """Whether the id is still used by the producer of this very transaction."""
        return self.producer_id == transaction.producer_id and self.producer_epoch == transaction.producer_epoch


def verdict(
    transaction: Transaction, now: Description, *, epoch: int, marker: int | None, marker_may_be_gone: bool
) -> Verdict | None:
    """Say what became of a transaction that EndTxn could not commit; None: not yet known, look again.

    ``marker`` is the newest epoch that the Spark partition's group says is applied, read after ``now`` was; it became
    visible together with the transaction, so it is proof where the id alone, which others use again, is none.
    """
    mine = now.is_of(transaction)
    if now.state in ENDING or (mine and now.state is State.ONGOING):
        return None
    if marker is not None and marker >= epoch:
        return COMMITTED
    if now.state is State.COMPLETE_COMMIT:
        # the marker of a commit follows it; if it never does, somebody has deleted it
        return COMMITTED if mine else None
    evidence = (
        f"transactional id {transaction.transactional_id} is {now.state.value} (producer {now.producer_id}, epoch "
        f"{now.producer_epoch}; prepared as producer {transaction.producer_id}, epoch {transaction.producer_epoch}), "
        f"and the newest epoch applied in its Spark partition is {marker}"
    )
    if marker is None and (marker_may_be_gone or now.state is State.NOT_FOUND):
        return Verdict(
            Outcome.UNKNOWN,
            f"{evidence}, which may be because the offset has expired (offsets.retention.minutes) or was deleted",
        )
    return Verdict(Outcome.ABORTED, evidence)
