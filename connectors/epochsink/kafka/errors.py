"""Translate failures of both clients into errors with a hint, by one table of Kafka's error codes.

`epochsink.kafka.transactions` has the table of the answers to EndTxn.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.kafka.librdkafka import NativeError

UNKNOWN_TOPIC: Final = 3
LEADER_NOT_AVAILABLE: Final = 5

NOT_AUTHORIZED: Final = frozenset({29, 30, 31})
"""Kafka's codes for a missing right on a topic, a group or the cluster."""

FENCED: Final = frozenset({-150, -144, 47, 90})
"""Codes that tell a producer that another one uses its transactional id, or that its transaction was ended."""

GIVEN_UP: Final = FENCED | {-192}
"""Codes after which this transaction cannot be finished, but the same rows can be written in another one."""

_FLAPPING: Final = frozenset({-181, -169})
"""Codes for a failed handshake of TLS or SASL."""


class Unreachable(PrepareFailed, OSError):
    """The cluster did not answer in time; it may have carried out the request."""


class Refused(PrepareFailed):
    """The cluster refused a request and will refuse it again."""

    @property
    def code(self) -> int | None:
        """Kafka's error code; None if the answer is an error only to us."""
        code: int | None = self.facts.get("code")
        return code


class Nature(enum.Enum):
    """Whether trying again can help."""

    PASSING = "trying again may help"
    SETTING = "an operator has to change a setting or a right"
    ROWS = "the rows themselves are refused"


class KnownError(NamedTuple):
    """What to do about an error code of librdkafka or of the broker."""

    nature: Nature
    hint: str


_FENCED: Final = (
    "no row is lost: Spark runs the task or the epoch again. Either another attempt at this task uses its "
    "transactional id, or the write took longer than transaction_timeout= and the broker aborted the transaction: "
    "raise transaction_timeout=, make epochs smaller, or set spool=True"
)

KNOWN_ERRORS: Final[dict[int, KnownError]] = {
    -193: KnownError(Nature.PASSING, "a host name of bootstrap_servers or of the brokers' advertised.listeners cannot "
                  "be resolved from this machine: correct the name or the name service"),
    -192: KnownError(Nature.PASSING, "the broker did not take the rows within delivery.timeout.ms: check that the "
                  "partition has a leader and enough in-sync replicas"),
    -190: KnownError(Nature.ROWS, "write a partition that the topic has, or leave it null for the partitioner"),
    -188: KnownError(Nature.ROWS, "create the topic, or correct its name"),
    -187: KnownError(Nature.PASSING, "check that every executor can reach bootstrap_servers"),
    -185: KnownError(Nature.PASSING, "check that every executor can reach bootstrap_servers and the brokers' "
                  "advertised.listeners"),
    -181: KnownError(Nature.SETTING, "check that security.protocol, ssl.ca.location and the host name in the "
                  "broker's certificate match the broker"),
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
                "other rows out with where="),
    90: KnownError(Nature.PASSING, _FENCED),
}  # fmt: skip
"""Negative keys are librdkafka's own codes; positive keys are the broker's."""

_OTHERWISE: Final = KnownError(Nature.PASSING, "try again; if this repeats, read the broker's log")


def error(failure: NativeError, doing: str, **facts: Any) -> PrepareFailed:
    """Return what to raise for a failed call; ``doing`` says what was attempted."""
    refusal = KNOWN_ERRORS.get(failure.code, _OTHERWISE)
    kind = RowsRejected if refusal.nature is Nature.ROWS else PrepareFailed
    may_pass = refusal.nature is Nature.PASSING
    return kind(f"{doing}: {failure.text}", hint=refusal.hint, code=failure.code, may_pass=may_pass, **facts)


def may_flap(code: int) -> bool:
    """Whether a broker that starts or stops may cause this refusal; only a lasting one counts then."""
    return code in _FLAPPING


def is_permanent(code: int) -> bool:
    """Whether waiting cannot help, because credentials, certificates, rights or rows are refused."""
    return code in KNOWN_ERRORS and KNOWN_ERRORS[code].nature is not Nature.PASSING


def is_passing(failure: BaseException) -> bool:
    """Whether the same request of the driver's client may succeed later. The broker may have carried it out.

    Exceptions are recognised by attributes, so that tasks do not import the driver's client.
    """
    if isinstance(failure, (Unreachable, Refused)):
        return False  # already retried
    return (
        isinstance(failure, OSError)
        or bool(getattr(failure, "retriable", False))
        or type(failure).__name__ == "UnknownBrokerIdError"  # a broker that has just stopped
    )


def refused(doing: str, failure: Exception) -> Refused:
    """Return what to raise if the driver's client failed and a retry cannot help."""
    code = getattr(failure, "errno", None)
    known = KNOWN_ERRORS.get(code) if isinstance(code, int) else None
    hint = known.hint if known else "read the broker's log; no row is lost"
    return Refused(f"{doing}: {type(failure).__name__}: {failure}", hint=hint, code=code, may_pass=False)


def hint(code: int) -> str:
    """Return what to do about an error code of the broker."""
    return KNOWN_ERRORS.get(code, _OTHERWISE).hint
