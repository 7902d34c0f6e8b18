"""What the user says about a Kafka sink."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from epochsink.errors import ConfigurationError
from epochsink.kafka import row_mapping
from epochsink.kafka.client_options import normalise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from epochsink.sink import Identity, SinkCommitter, SinkWriter, Task

DEFAULT_TRANSACTION_TIMEOUT: Final = 900.0
"""Seconds; the cap that brokers have unless somebody changed it."""

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class NewTopic:
    """How to create the topic if it does not exist. ``replication`` None: the broker's default."""

    partitions: int = 1
    replication: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka:
    """A Kafka topic (or several) as a sink: exactly once for consumers with ``isolation.level=read_committed``.

    Two forms. Rows with the columns of Spark's own Kafka sink (``value``, and perhaps ``key``, ``headers``, ``topic``,
    ``partition``, ``timestamp``) are written as they are. Of other rows, ``key``, ``value``, ``headers``,
    ``partition`` and ``timestamp`` are SQL expressions; without ``value`` the whole row is written as JSON.

    - ``topic``: for all rows; without it ``topic_column`` (SQL) or the column ``topic`` says it for each.
    - ``delete_when``: SQL predicate; such rows become tombstones (a key without a value).
    - ``spool``: keep a durable copy of the rows until the epoch is done. Without it, an epoch whose transaction the
      broker aborts, because the job was down for longer than ``transaction_timeout``, is lost to this topic: the query
      then stops with `OutcomeUnknown`.
    - ``transaction_timeout``: seconds that a prepared epoch may wait; None for the most that the broker allows.
    - ``timeout``: seconds that a task or the driver waits for a cluster that does not answer.
    - ``create_topic``: create ``topic`` so if it does not exist.
    - ``options``: settings of the client in librdkafka's names (``security.protocol``, ``compression.type``, ...).
    - ``allow_plaintext_credentials``: let a password cross a network readably.

    Raises ConfigurationError for everything that is wrong without asking the cluster.
    """

    bootstrap_servers: str
    topic: str | None = None
    key: str | None = None
    value: str | None = None
    headers: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    topic_column: str | None = None
    select: Sequence[str] = ("*",)
    where: str | None = None
    delete_when: str | None = None
    spool: bool = True
    transaction_timeout: float | None = None
    timeout: float = 120.0
    create_topic: NewTopic | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    allow_plaintext_credentials: bool = False

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise ConfigurationError("bootstrap_servers is empty", hint="'host:port', several with commas")
        self._check_topic()
        if self.transaction_timeout is not None and self.transaction_timeout < 1:
            raise ConfigurationError(
                f"transaction_timeout = {self.transaction_timeout} s leaves no time to write",
                hint="give at least 1 s; longer than the longest outage to be survived without a replay is best",
            )
        if self.timeout <= 0:
            raise ConfigurationError(f"timeout = {self.timeout} s", hint="give a positive number of seconds")
        normal = normalise(
            self.options,
            self.bootstrap_servers,
            allow_plaintext_credentials=self.allow_plaintext_credentials,
        )
        object.__setattr__(self, "options", normal)
        object.__setattr__(self, "select", tuple(self.select))
        self._let_librdkafka_check()

    @property
    def distribute_by(self) -> Sequence[str]:
        """No distribution is asked for: any row may go into any transaction."""
        return ()

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the SQL expressions that make the messages. Raises ConfigurationError."""
        said = row_mapping.Expressions(
            key=self.key,
            value=self.value,
            headers=self.headers,
            topic=self.topic_column,
            partition=self.partition,
            timestamp=self.timestamp,
        )
        return row_mapping.render(row, schema, said, self.topic, self.delete_when)

    def writer(self, task: Task) -> SinkWriter:
        """Open the task's transaction. Raises `PrepareFailed`."""
        from epochsink.kafka.writer import KafkaWriter  # noqa: PLC0415 - the clients are an extra

        return KafkaWriter(self, task, task.uuid)

    def committer(self) -> SinkCommitter:
        """Return the driver's side. Does not connect."""
        from epochsink.kafka.committer import KafkaCommitter  # noqa: PLC0415 - the clients are an extra

        return KafkaCommitter(self)

    def transaction_timeout_ms(self, identity: Identity) -> int:
        """Return how long brokers keep this sink's transactions open: as said, or the cap found when it joined."""
        said = self.transaction_timeout or identity.origin.get("transaction_timeout")
        return round(1000 * (said or DEFAULT_TRANSACTION_TIMEOUT))

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        said = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value != defaults[name])
        return f"Kafka({said})"

    def _check_topic(self) -> None:
        if self.topic is not None and (not _TOPIC.fullmatch(self.topic) or self.topic in (".", "..")):
            raise ConfigurationError(
                f"topic = {self.topic!r} is no topic's name",
                hint="1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'",
            )
        if self.topic is not None and self.topic_column is not None:
            raise ConfigurationError("topic= and topic_column= are both set", hint="leave one of them out")
        if self.create_topic is not None and self.topic is None:
            raise ConfigurationError("create_topic= is set without topic=", hint="set topic= to its name")

    def _let_librdkafka_check(self) -> None:
        """Refuse options that librdkafka does not know; it needs no connection for that."""
        from epochsink.kafka.producer_config import check_options  # noqa: PLC0415 - the clients are an extra

        check_options(self.options)
