"""Hold the arguments of a Kafka sink, and check what can be checked without a client."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import pyarrow as pa

from epochsink import arguments
from epochsink.errors import ConfigurationError
from epochsink.sink import Identity

DEFAULT_TRANSACTION_TIMEOUT: Final = 60.0
"""Seconds. Readers wait this long for the transactions of a dead job."""

DEFAULT_CAP: Final = 900.0
"""Seconds; the brokers' default of transaction.max.timeout.ms."""

Rejected = Literal["stop", "dead_letter"]

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@runtime_checkable
class Rendering(Protocol):
    """Renders a message's key or value otherwise than by the user's SQL: `epochsink.Avro`."""

    def begin_run(self) -> None:
        """Ask again what was asked in an earlier run of this process. Called by each check, before `sql`."""

    def sql(self, row: str, schema: pa.Schema) -> str:
        """Return the SQL of the bytes. ``row`` names the struct with the fields of ``schema``."""

    def refuse_readable_password(self) -> None:
        """Raise ConfigurationError if a password would be sent unencrypted."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    """How to create the topic if it does not exist.

    Args:
        partitions: the number of partitions.
        replication: the number of replicas of each partition; None for the brokers' default.
        config: topic settings in Kafka's names, e.g. {"cleanup.policy": "compact"}.
    """

    partitions: int = 1
    replication: int | None = None
    config: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        arguments.count("partitions", self.partitions)
        if self.replication is not None:
            arguments.count("replication", self.replication)
        object.__setattr__(self, "config", arguments.mapping("config", self.config))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KafkaConfig:
    """The arguments of `epochsink.Kafka`; see there. ``select`` is a tuple here."""

    bootstrap_servers: str
    topic: str | None = None
    key: str | Rendering | None = None
    value: str | Rendering | None = None
    headers: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    topic_column: str | None = None
    select: Sequence[str] = ("*",)
    where: str | None = None
    delete_when: str | None = None
    on_rejected: Rejected = "stop"
    dead_letter_topic: str | None = None
    letters_limit: float = 1.0
    spool: bool | None = None
    transaction_timeout: float | None = None
    timeout: float = 120.0
    create: NewTopic | bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        arguments.text("bootstrap_servers", self.bootstrap_servers)
        for name in (
            "topic",
            "headers",
            "partition",
            "timestamp",
            "topic_column",
            "where",
            "delete_when",
            "dead_letter_topic",
        ):
            arguments.optional_text(name, getattr(self, name))
        arguments.flag("allow_insecure", self.allow_insecure)
        for name in ("key", "value"):
            given = getattr(self, name)
            if not isinstance(given, Rendering):
                object.__setattr__(self, name, _single(name, given))
            elif not self.allow_insecure:
                given.refuse_readable_password()
        if self.spool is not None:
            arguments.flag("spool", self.spool)
        object.__setattr__(self, "select", arguments.expressions("select", self.select) or ("*",))
        object.__setattr__(self, "timeout", arguments.seconds("timeout", self.timeout))
        object.__setattr__(self, "options", arguments.mapping("options", self.options))
        self._check_topic("topic", self.topic)
        if self.topic is not None and self.topic_column is not None:
            raise ConfigurationError("topic= and topic_column= are both set", hint="leave one of them out")
        self._check_letters()
        self._check_create()
        self._check_transaction_timeout()

    @property
    def new_topic(self) -> NewTopic | None:
        """How to create the topic; None if it must exist."""
        if isinstance(self.create, NewTopic):
            return self.create
        return NewTopic() if self.create else None

    @property
    def letters_topic(self) -> str | None:
        """The topic of dead letters; None if a row that the topic cannot take stops the query."""
        return None if self.on_rejected == "stop" else self.dead_letter_topic or f"{self.topic}.dead_letter"

    @property
    def is_redone(self) -> bool:
        """Whether rows are kept, in the topic or in the spool, until their epoch is done."""
        return self.spool is not False

    def transaction_timeout_ms(self, identity: Identity) -> int:
        """Return for how long brokers keep the transactions of tasks open.

        If rows are kept, the default is short, because readers wait for the transactions of a dead job. Otherwise the
        default is the longest time that the brokers allowed when this sink joined.
        """
        known = identity.origin.get("transaction_timeout")
        cap = known or DEFAULT_CAP
        # the client refuses a delivery timeout above the transaction timeout
        short = max(DEFAULT_TRANSACTION_TIMEOUT, float(self.options.get("message.timeout.ms", 0)) / 1000)
        default = min(short, cap) if self.is_redone else cap
        return round(1000 * (self.transaction_timeout or default))

    def longest_transaction_timeout_ms(self, identity: Identity) -> int:
        """Return for how long brokers keep the transactions open into which the driver writes lost rows again.

        The timeout of the tasks may be too short: a large epoch would expire again while the driver writes it.
        """
        cap = identity.origin.get("transaction_timeout")  # None without the right to ask
        return max(self.transaction_timeout_ms(identity), round(1000 * (cap or 0)))

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        defaults = {item.name: item.default for item in dataclasses.fields(self)} | {"options": {}}
        said = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value != defaults[name])
        return f"{type(self).__name__}({said})"

    @staticmethod
    def _check_topic(argument: str, name: str | None) -> None:
        if name is not None and (not _TOPIC.fullmatch(name) or name in (".", "..")):
            raise ConfigurationError(
                f"invalid {argument}={name!r}: not a name that Kafka accepts",
                hint="1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'",
            )

    def _check_letters(self) -> None:
        arguments.choice("on_rejected", self.on_rejected, ("stop", "dead_letter"))
        object.__setattr__(self, "letters_limit", arguments.share("letters_limit", self.letters_limit))
        if self.on_rejected == "stop":
            for name, given in (
                ("letters_limit", self.letters_limit != 1.0),
                ("dead_letter_topic", self.dead_letter_topic),
            ):
                if given:
                    raise ConfigurationError(
                        f"{name}={getattr(self, name)!r} without on_rejected='dead_letter': no row becomes a dead "
                        "letter",
                        hint=f"give on_rejected='dead_letter', or leave {name}= out",
                    )
            return
        if self.topic is None:
            raise ConfigurationError(
                "on_rejected='dead_letter' without topic=: which rows become dead letters depends on the limits of one "
                "topic, and here each row names its own",
                hint="set topic=, or leave on_rejected= out",
            )
        if self.letters_topic == self.topic:
            raise ConfigurationError(
                f"dead_letter_topic={self.topic!r} is the topic of the rows itself",
                hint="name another topic, or leave dead_letter_topic= out",
            )
        self._check_topic("dead_letter_topic", self.letters_topic)

    def _check_create(self) -> None:
        if not isinstance(self.create, (NewTopic, bool)):
            raise ConfigurationError(
                f"invalid create={self.create!r}: expected True, False or NewTopic(...)",
                hint="for example create=NewTopic(partitions=6)",
            )
        if self.create and self.topic is None:
            raise ConfigurationError("create= is set without topic=", hint="set topic= to the name of the new topic")

    def _check_transaction_timeout(self) -> None:
        if self.transaction_timeout is None:
            return
        said = arguments.seconds("transaction_timeout", self.transaction_timeout)
        if said < 1:
            raise ConfigurationError(
                f"invalid transaction_timeout={said:g}: under a second, there is no time to write an epoch",
                hint="for example transaction_timeout=60",
            )
        object.__setattr__(self, "transaction_timeout", said)


def _single(name: str, value: str | Sequence[str] | None) -> str | None:
    """Return the expression of an argument that takes at most one."""
    texts = arguments.expressions(name, value)
    if len(texts) > 1:
        raise ConfigurationError(
            f"invalid {name}={list(texts)!r}: a Kafka message has one {name}",
            hint=f'combine them, for example {name}="to_json(struct({", ".join(texts)}))"',
        )
    return texts[0] if texts else None
