"""Define the Kafka sink that users construct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from epochsink import arguments
from epochsink.kafka import row_mapping
from epochsink.kafka.client_options import normalise
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.rendered_value import value_of
from epochsink.sink import Participant, Sink, SinkWriter, Task


@arguments.checked_names
class Kafka(KafkaConfig, Sink):
    """A Kafka topic (or several) as a sink: exactly once for consumers with ``isolation.level=read_committed``.

    Rows with the columns of Spark's own Kafka sink (``value``, and optionally ``key``, ``headers``, ``topic``,
    ``partition``, ``timestamp``) are written as they are. For other rows, ``key``, ``value``, ``headers``,
    ``partition`` and ``timestamp`` are SQL expressions; without ``value`` the whole row is written as JSON.

    Args:
        bootstrap_servers: 'host:port', or several, separated by commas.
        topic: the topic of all rows; None if ``topic_column`` or the column 'topic' names the topic of each row.
        key: SQL expression of the message's key, or Avro(...); None for no key, or for the column 'key'.
        value: SQL expression of the message's value, or Avro(...); None for the row as JSON, or for the column 'value'.
        headers: SQL expression, an array of structs of key and value; None for none, or for the column 'headers'.
        partition: SQL expression of the topic's partition; if it is null or None, the key's hash chooses.
        timestamp: SQL expression of the message's timestamp; if it is null or None, the time of writing.
        topic_column: SQL expression of each row's topic.
        select: SQL expressions that make the row: one as a string, or several as a list; all columns by default.
        where: SQL predicate that selects the rows for this topic; None for all rows.
        delete_when: SQL predicate that selects the rows that become tombstones (a key without a value); None for none.
        on_rejected: "stop": a row that the topic cannot take stops the query. "dead_letter": the row goes to
            ``dead_letter_topic``, in the transaction of its epoch, and the others go on. Needs ``topic``.
        dead_letter_topic: the topic of dead letters, which `check` creates; None for ``topic`` with '.dead_letter'.
        letters_limit: the share of an epoch's rows, 0 to 1, above which dead letters stop the query after all.
        spool: where rows are kept until their epoch is done. If the brokers abort the epoch's transaction, because the
            job is down for longer than ``transaction_timeout``, the rows are written again from there. None: in the
            topic, whose log also keeps aborted records, if its retention is long enough (see
            `epochsink.kafka.rows_in_log`), else in a durable copy beside the checkpoint. True: always in the copy.
            False: nowhere; an aborted transaction then stops the query.
        transaction_timeout: seconds after which the brokers abort an open transaction. None for 60, or with
            ``spool=False`` for the longest time that the brokers allow.
        timeout: seconds that a task or the driver waits for a cluster that does not answer.
        create: create ``topic`` if it does not exist: True, or NewTopic(...) with its settings.
        options: client settings in librdkafka's names, e.g. {"security.protocol": "SSL"}.
        allow_insecure: allow a password to be sent unencrypted.

    Raises ConfigurationError for each mistake that can be found without the cluster.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        KafkaConfig.__post_init__(self)
        arguments.require_package("Kafka", "kafka", "confluent_kafka", "kafka")
        normal = normalise(self.options, self.bootstrap_servers, allow_insecure=self.allow_insecure)
        object.__setattr__(self, "options", normal)
        self._let_librdkafka_check()

    def count_deletes(self, rows: pa.RecordBatch) -> int:
        """Return how many rows are tombstones."""
        return int(value_of(rows).null_count)

    @property
    def keeps_order(self) -> bool:
        """True: a task writes its rows in order, so a key's messages keep the order of the stream's partition."""
        return True

    def check_columns(self, schema: pa.Schema) -> None:
        """Do nothing: `columns` casts every column."""

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the SQL expressions that make the messages. Raises ConfigurationError."""
        return row_mapping.columns(self, row, schema)

    def writer(self, task: Task) -> SinkWriter:
        """Open the task's transaction. Raises `PrepareFailed`."""
        from epochsink.kafka.writer import KafkaWriter  # noqa: PLC0415 - the clients are an extra

        return KafkaWriter(self, task, task.uuid, self.topic)

    def participant(self, members: Mapping[str, KafkaConfig]) -> Participant:
        """Return the driver's side of the sink. Does not connect."""
        from epochsink.kafka.cluster import Cluster  # noqa: PLC0415 - the clients are an extra
        from epochsink.kafka.committer import KafkaCommitter  # noqa: PLC0415 - likewise

        return KafkaCommitter(members, Cluster(self.bootstrap_servers, self.options, self.timeout))

    def _let_librdkafka_check(self) -> None:
        """Refuse options that librdkafka does not know. Does not connect."""
        from epochsink.kafka.client_options import check_options  # noqa: PLC0415 - the clients are an extra

        check_options(self.options)
