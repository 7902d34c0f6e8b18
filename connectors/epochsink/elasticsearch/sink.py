"""Define the Elasticsearch sink that users construct.

The vendor's client is imported where it is used, because a task that only spools does not need it. The import takes
more than a second of processor time in each of Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from epochsink import arguments
from epochsink.elasticsearch import row_mapping
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.writer import ElasticsearchWriter
from epochsink.sink import Sink

if TYPE_CHECKING:
    from epochsink.elasticsearch.committer import ElasticsearchCommitter
    from epochsink.elasticsearch.server import ElasticsearchServer
    from epochsink.sink import Task


@arguments.checked_names
class Elasticsearch(ElasticsearchConfig, Sink):
    """Documents of one index, applied epoch by epoch from the spool after the checkpoint.

    Args:
        hosts: one URL or several, each with scheme, name and port: ``"https://search.example:9200"``.
        index: the name of an index, or of an alias of exactly one index.
        index_by: instead of ``index``, an SQL expression for the name of each row's index. With ``key``, it must follow
            from the key. Missing indices are created when an epoch is voted on.
        key: the document's ``_id``: a column, an SQL expression, or several (then the ``_id`` is their JSON array). A
            row replaces the stored document with its key. Without a key documents are only added, with an ``_id`` made
            of query, sink, epoch and position.
        select: the SQL expressions of the document's fields; all columns by default.
        where: an SQL predicate: which rows become documents.
        order_by: SQL expressions. If several rows of an epoch have the same key, the row with the largest value wins,
            in Spark's order: NULL is the smallest, NaN the largest. Without it the later row of a task wins, and rows
            of one key in several tasks are refused.
        delete_when: an SQL predicate: which rows delete the document of their key.
        routing: a column or SQL expression whose value, as text, chooses the shard. With ``key``, it must follow from
            the key. NULL and empty values are refused.
        pipeline: an ingest pipeline for the documents, instead of the index's default pipeline.
        on_rejected: what to do with documents that the server permanently refuses: ``"stop"`` stops the query (the
            epoch stays pending), ``"dead_letter"`` writes them to ``dead_letter_index``.
        dead_letter_index: the index for such documents, with reason, epoch and source.
        letters_limit: the share of an epoch's rows, 0 to 1, above which dead letters stop the query after all. What a
            task finds counts before the epoch is decided; what the server refuses, when the epoch is applied: it stays
            pending then.
        validate: whether each task asks the server before the checkpoint if it would accept the documents. The server
            then parses each document twice.
        refresh: whether an epoch is searchable at the end of its commit. With ``index.refresh_interval`` of -1 searches
            find nothing of it before, see "What searches see" on the reference page.
        create: whether `check` creates a missing index from the row's schema; a dict gives its settings.
        gc_deletes: how long the index must remember the versions of deleted documents, at least ``"60s"``. If a driver
            pauses for longer, its delayed write could restore a deleted document.
        partition_by_key: whether a shuffle in each epoch brings all rows of a key into one task, so that the driver
            reads no ids: for epochs of tens of millions of rows. Needs ``order_by``.
        timeout: the seconds without any success after which a commit gives up. The epoch stays pending.
        allow_insecure: allow credentials to be sent unencrypted to another machine.
        options: options of the vendor's client: ``api_key``, ``basic_auth``, ``bearer_auth``, ``ca_certs``,
            ``ssl_assert_fingerprint``, ``headers``, ``request_timeout``, ``http_compress``, ...

    Raises `ConfigurationError`. Does not connect.
    """

    @property
    def distribute_by(self) -> tuple[str, ...]:
        """The key's expressions over the stream if ``partition_by_key`` is set, else none."""
        return self.partitioning

    def count_deletes(self, rows: pa.RecordBatch) -> int:
        """Return how many rows are deletes."""
        return int(rows.column("source").null_count)

    @property
    def keeps_order(self) -> bool:
        """Whether the order of rows in a task counts: without ``order_by`` the later row of a key wins."""
        return bool(self.key) and not self.order_by

    def placement(self, schema: pa.Schema) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return ``routing``, and the expressions of the key from which it must follow, over the stream's columns."""
        if not self.placed_by:
            return {}, ()
        return row_mapping.placement(schema, self.select, key=self.key, index_by=self.index_by, routing=self.routing)

    def check_columns(self, schema: pa.Schema) -> None:
        """Check that the values of order_by= can be sorted. Raises `ConfigurationError`."""
        row_mapping.check_ranks(schema, self.order_by)

    def columns(self, row: str, schema: pa.Schema) -> list[str]:
        """Return the expressions that render action lines' ends and documents. Raises `ConfigurationError`."""
        return row_mapping.columns(
            row,
            schema,
            key=self.key,
            delete_when=self.delete_when,
            order_by=self.order_by,
            routing=self.routing,
            index_by=self.index_by,
        )

    def writer(self, task: Task) -> ElasticsearchWriter:
        """Make the writer of one task attempt. It connects only to validate."""
        if not self.validate:
            return ElasticsearchWriter(task, by_task=self.partition_by_key, dead_letters=self.dead_letter_index)
        from epochsink.elasticsearch.preflight import Validator  # noqa: PLC0415 - a task that only spools needs none

        return ElasticsearchWriter(task, Validator(self.connected(), self), by_task=self.partition_by_key)

    def participant(self, members: Mapping[str, ElasticsearchConfig]) -> ElasticsearchCommitter:
        """Make the driver's part. Does not connect yet."""
        from epochsink.elasticsearch.committer import ElasticsearchCommitter  # noqa: PLC0415 - no task needs it

        return ElasticsearchCommitter(members, self.connected)

    def connected(self) -> ElasticsearchServer:
        """Return the cluster, by the vendor's client. Sends nothing yet."""
        from epochsink.elasticsearch.connection import connect  # noqa: PLC0415 - imports the client
        from epochsink.elasticsearch.server import ElasticsearchServer  # noqa: PLC0415 - no task needs it

        return ElasticsearchServer(connect(self))
