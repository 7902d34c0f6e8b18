"""List what is compared: each system, where it writes, how its documentation says to use it, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Place = Literal["topic", "table", "index"]
SPARK: Final = "https://spark.apache.org/docs/4.0.0/streaming"
FLINK: Final = "https://nightlies.apache.org/flink/flink-docs-release-2.3/docs/connectors"
FOREACH_BATCH: Final = f"[Spark]({SPARK}/apis-on-dataframes-and-datasets.html#foreachbatch)"


@dataclass(frozen=True)
class System:
    """One way to write a stream.

    ``promise`` is what its documentation says, with where; ``setting`` is how it was used. ``packages`` are what does
    the writing, beside Spark. ``keyed``: the target holds the newest row of each key.
    """

    name: str
    title: str
    place: Place
    promise: str
    setting: str
    packages: tuple[str, ...] = ()
    keyed: bool = False
    ours: bool = False
    flink: bool = False
    outlasted: bool = False


SYSTEMS: Final = (
    System(
        "spark-kafka",
        "Spark's Kafka sink",
        "topic",
        f"at least once; some records may be duplicated ([Spark]({SPARK}/structured-streaming-kafka-integration.html))",
        '`writeStream.format("kafka")`, `kafka.acks=all`, `kafka.enable.idempotence=true`',
        ("kafka-clients",),
    ),
    System(
        "epochsink-kafka",
        "epochsink, Kafka",
        "topic",
        "exactly once for `read_committed` readers ([epochsink](../reference/kafka.md))",
        "`Kafka(bootstrap_servers=..., topic=...)`, defaults",
        ("epochsink", "confluent-kafka"),
        ours=True,
    ),
    System(
        "flink-kafka",
        "Flink's KafkaSink",
        "topic",
        f"exactly once for `read_committed` readers ([Flink]({FLINK}/datastream/kafka/#fault-tolerance))",
        "SQL, `sink.delivery-guarantee=exactly-once`, `sink.transactional-id-prefix`, `transaction.timeout.ms` of "
        "10 minutes; restarted from the newest retained checkpoint",
        ("flink", "flink-sql-connector-kafka"),
        flink=True,
    ),
    System(
        "flink-kafka-late",
        "Flink's KafkaSink, down for longer than its transactions",
        "topic",
        "exactly once if it is restarted within the timeout, else rows may be lost "
        f"([Flink]({FLINK}/datastream/kafka/#fault-tolerance))",
        "as before, `transaction.timeout.ms` of 5 seconds",
        ("flink", "flink-sql-connector-kafka"),
        flink=True,
        outlasted=True,
    ),
    System(
        "epochsink-kafka-late",
        "epochsink, Kafka, down for longer than its transactions",
        "topic",
        "exactly once for `read_committed` readers ([epochsink](../reference/kafka.md#transactions-that-expire))",
        "`Kafka(bootstrap_servers=..., topic=..., transaction_timeout=5)`",
        ("epochsink", "confluent-kafka"),
        ours=True,
        outlasted=True,
    ),
    System(
        "jdbc-append",
        "`foreachBatch`, JDBC append",
        "table",
        f"at least once ({FOREACH_BATCH})",
        '`batch.write.format("jdbc").mode("append")`, `reWriteBatchedInserts=true`; no unique key',
        ("postgresql-jdbc",),
    ),
    System(
        "batch-id-table",
        "`foreachBatch`, batch id in the same transaction",
        "table",
        f"exactly once, by the batch id ({FOREACH_BATCH}; the idea of [Delta]"
        "(https://docs.delta.io/latest/delta-streaming.html#idempotent-table-writes-in-foreachbatch)'s "
        "`txnAppId` and `txnVersion`, rebuilt on PostgreSQL)",
        "JDBC into a staging table (`truncate=true`), then one transaction: `INSERT INTO applied ... ON CONFLICT DO "
        "NOTHING RETURNING`, and if that is new, `INSERT INTO target SELECT ... FROM staging`; no unique key",
        ("postgresql-jdbc", "psycopg"),
    ),
    System(
        "flink-jdbc",
        "Flink's JDBC sink, XA",
        "table",
        f"exactly once ([Flink]({FLINK}/datastream/jdbc/#jdbcsinkexactlyoncesink))",
        "`JdbcSink.builder().buildExactlyOnce`, `withTransactionPerConnection(true)`, `withMaxRetries(0)`; no unique "
        "key; restarted from the newest retained checkpoint",
        ("flink", "flink-connector-jdbc-core", "postgresql-jdbc"),
        flink=True,
    ),
    System(
        "epochsink-append",
        "epochsink, PostgreSQL append",
        "table",
        "exactly once; readers see an epoch once it is decided ([epochsink](../reference/postgres.md))",
        "`Postgres(dsn, table=...)`, defaults; no unique key",
        ("epochsink", "psycopg"),
        ours=True,
    ),
    System(
        "staged-upsert",
        "`foreachBatch`, staging table and `ON CONFLICT`",
        "table",
        f"at least once; the key makes repetition harmless ({FOREACH_BATCH})",
        "JDBC into a staging table (`truncate=true`), then `INSERT ... SELECT DISTINCT ON (key) ... ON CONFLICT (key) "
        "DO UPDATE ... WHERE target.kver <= excluded.kver`",
        ("postgresql-jdbc", "psycopg"),
        keyed=True,
    ),
    System(
        "epochsink-upsert",
        "epochsink, PostgreSQL upsert",
        "table",
        "exactly once; readers see an epoch once it is decided ([epochsink](../reference/postgres.md))",
        '`Postgres(dsn, table=..., key=["key"], order_by="kver")`, defaults',
        ("epochsink", "psycopg"),
        keyed=True,
        ours=True,
    ),
    System(
        "parallel-bulk",
        "`foreachPartition`, `parallel_bulk`",
        "index",
        f"at least once; the `_id` makes repetition harmless ({FOREACH_BATCH}; [elasticsearch-py]"
        "(https://elasticsearch-py.readthedocs.io/en/v8.17.2/helpers.html))",
        "`_id` of the row's place in the source, `retry_on_timeout=True`, `max_retries=5`, errors raised",
        ("elasticsearch",),
    ),
    System(
        "epochsink-elasticsearch",
        "epochsink, Elasticsearch",
        "index",
        "exactly once; an epoch is applied once it is decided, and may be seen in part meanwhile "
        "([epochsink](../reference/elasticsearch.md))",
        "`Elasticsearch(url, index=...)`, defaults; without a key of the rows",
        ("epochsink", "elasticsearch"),
        ours=True,
    ),
)
