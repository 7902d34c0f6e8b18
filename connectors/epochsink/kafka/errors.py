"""Say what a failed call of either client means for the epoch: one table by Kafka's error code.

The answers to EndTxn are in `epochsink.kafka.transactions`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from epochsink.errors import PrepareFailed, RowsRejected

if TYPE_CHECKING:
    from epochsink.kafka.librdkafka import NativeError

UNKNOWN_TOPIC: Final = 3
LEADER_NOT_AVAILABLE: Final = 5

NOT_AUTHORIZED: Final = frozenset({29, 30, 31})
"""Kafka's codes for a missing right on a topic, a group or the cluster."""

FENCED: Final = frozenset({-150, -144, 47, 90})
"""Codes by which a producer learns that its transactional id has another user, or that its transaction was ended."""

GIVEN_UP: Final = FENCED | {-192}
"""Codes after which a transaction cannot be finished, though the same rows in another one could be."""

_FLAPPING: Final = frozenset({-181, -169})
"""Codes for a failed handshake: of TLS, and of SASL."""


class Unreachable(PrepareFailed, OSError):
    """The cluster did not answer in time; whether it carried out the request is unknown."""


class Refused(PrepareFailed):
    """The cluster has refused a request, and will again; ``facts["code"]`` is Kafka's error code, if it gave one."""


class Nature(enum.Enum):
    """Whether trying again can help."""

    PASSING = "trying again may help"
    SETTING = "an operator has to change a setting or a right"
    ROWS = "the rows themselves are refused"


class KnownError(NamedTuple):
    """What a code of librdkafka or of the broker calls for."""

    nature: Nature
    hint: str


_FENCED: Final = (
    "nothing is lost, and Spark runs the task or the epoch again. Either another attempt at this task uses its "
    "transactional id, or the write took longer than transaction_timeout= and the broker aborted the transaction: "
    "raise transaction_timeout=, make epochs smaller, or set spool=True"
)

KNOWN_ERRORS: Final[dict[int, KnownError]] = {
    -193: KnownError(Nature.PASSING, "a host name of bootstrap_servers or of the brokers' advertised.listeners cannot "
                  "be resolved from this machine: correct the name or the name service"),
    -192: KnownError(Nature.PASSING, "the broker did not take the rows within delivery.timeout.ms: check that the "
                  "partition has a leader and enough in-sync replicas; Spark runs the epoch again"),
    -190: KnownError(Nature.ROWS, "write a partition that the topic has, or leave it null for the partitioner"),
    -188: KnownError(Nature.ROWS, "create the topic, or correct its name"),
    -187: KnownError(Nature.PASSING, "check that every executor can reach bootstrap_servers"),
    -185: KnownError(Nature.PASSING, "check that every executor can reach bootstrap_servers and the brokers' "
                  "advertised.listeners; Spark runs the epoch again"),
    -181: KnownError(Nature.SETTING, "check that security.protocol, ssl.ca.location and the host name in the "
                  "broker's certificate fit"),
    -169: KnownError(Nature.SETTING, "correct sasl.username, sasl.password and sasl.mechanism in options"),
    -150: KnownError(Nature.PASSING, _FENCED),
    -144: KnownError(Nature.PASSING, _FENCED),
    3: KnownError(Nature.ROWS, "create the topic, or correct its name"),
    10: KnownError(Nature.ROWS, "raise the topic's max.message.bytes (then also message.max.bytes in options), or keep "
                "such rows out with where=; if each row is smaller than that, lower batch.size in options"),
    17: KnownError(Nature.ROWS, "topic names have 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'"),
    19: KnownError(Nature.PASSING, "bring the missing replicas back, or lower min.insync.replicas"),
    29: KnownError(Nature.SETTING, "allow the user WRITE, READ and DESCRIBE on the topic"),
    30: KnownError(Nature.SETTING, "allow the user READ on the groups with the prefix 'epochsink.', where the "
                "newest epoch applied is kept"),
    31: KnownError(Nature.SETTING, "allow the user IDEMPOTENT_WRITE on the cluster"),
    32: KnownError(Nature.ROWS, "write timestamps that the topic's message.timestamp.before.max.ms and "
                "message.timestamp.after.max.ms allow, or none"),
    35: KnownError(Nature.SETTING, "use brokers of Kafka 3.0 or later"),
    47: KnownError(Nature.PASSING, _FENCED),
    50: KnownError(Nature.SETTING, "set transaction_timeout= to at most the broker's transaction.max.timeout.ms, "
                "or raise that"),
    53: KnownError(Nature.SETTING, "allow the user WRITE and DESCRIBE on transactional ids with the prefix "
                "'epochsink.'"),
    87: KnownError(Nature.ROWS, "a topic with cleanup.policy=compact takes only rows with a key: set key=, or keep "
                "rows without one out with where="),
    90: KnownError(Nature.PASSING, _FENCED),
}  # fmt: skip
"""Keys below zero are librdkafka's own codes, those above zero come from the broker."""

_OTHERWISE: Final = KnownError(Nature.PASSING, "Spark runs the epoch again; if this goes on, read the broker's log")


def error(failure: NativeError, doing: str, **facts: Any) -> PrepareFailed:
    """Return what to raise for a failed call; ``doing`` says what was attempted."""
    refusal = KNOWN_ERRORS.get(failure.code, _OTHERWISE)
    kind = RowsRejected if refusal.nature is Nature.ROWS else PrepareFailed
    may_pass = refusal.nature is Nature.PASSING
    return kind(f"{doing}: {failure.text}", hint=refusal.hint, code=failure.code, may_pass=may_pass, **facts)


def may_flap(code: int) -> bool:
    """Whether a refusal may come from a broker that is starting or stopping: it counts only if it lasts."""
    return code in _FLAPPING


def is_permanent(code: int) -> bool:
    """Whether waiting does not help: credentials, certificates, rights or rows are refused."""
    return code in KNOWN_ERRORS and KNOWN_ERRORS[code].nature is not Nature.PASSING


def is_passing(failure: BaseException) -> bool:
    """Whether the same request of the driver's client may succeed later; the broker may have carried it out.

    Recognised by attributes, so that tasks, which do not use that client, need not import it.
    """
    if isinstance(failure, (Unreachable, Refused)):
        return False  # has been retried already
    return (
        isinstance(failure, OSError)
        or bool(getattr(failure, "retriable", False))
        or type(failure).__name__ == "UnknownBrokerIdError"  # a broker that has just left
    )


def refused(doing: str, failure: Exception) -> Refused:
    """Return what to raise for a failure of the driver's client that does not pass."""
    code = getattr(failure, "errno", None)
    known = KNOWN_ERRORS.get(code) if isinstance(code, int) else None
    hint = known.hint if known else "read the broker's log; nothing is lost meanwhile"
    return Refused(f"{doing}: {type(failure).__name__}: {failure}", hint=hint, code=code, may_pass=False)


def hint(code: int) -> str:
    """Return what to do about an error code of the broker."""
    return KNOWN_ERRORS.get(code, _OTHERWISE).hint
