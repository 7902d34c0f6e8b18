"""Define the OpenSearch sink that users construct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from epochsink import arguments
from epochsink.elasticsearch.sink import Elasticsearch

if TYPE_CHECKING:
    from epochsink.opensearch.server import OpenSearchServer

_SECRETS: Final = frozenset({"headers", "http_auth"})
_REQUEST_TIMEOUT: Final = 60.0


@arguments.checked_names
class OpenSearch(Elasticsearch):
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
        options: options of the vendor's client: ``http_auth``, ``ca_certs``, ``ssl_assert_fingerprint``, ``headers``,
            ``timeout`` (of a request, in seconds), ``http_compress``, ...

    Raises `ConfigurationError`. Does not connect.
    """

    product: ClassVar[str] = "OpenSearch"
    package: ClassVar[str] = "opensearchpy"
    secrets: ClassVar[frozenset[str]] = _SECRETS
    known_options: ClassVar[frozenset[str]] = _SECRETS | {
        "ca_certs",
        "client_cert",
        "client_key",
        "http_compress",
        "opaque_id",
        "ssl_assert_fingerprint",
        "ssl_assert_hostname",
        "ssl_show_warn",
        "timeout",
        "verify_certs",
    }

    @property
    def client_options(self) -> dict[str, Any]:
        """The options for the vendor's client."""
        options = super().client_options
        del options["request_timeout"]
        if "ssl_assert_fingerprint" in options:
            # this client would ask for an authority beside the fingerprint
            options = {"verify_certs": False, "ssl_show_warn": False, **options}
        return {"timeout": _REQUEST_TIMEOUT, **options}

    def connected(self) -> OpenSearchServer:
        """Return the cluster, by the vendor's client. Sends nothing yet."""
        from epochsink.opensearch.connection import connect  # noqa: PLC0415 - imports the client
        from epochsink.opensearch.server import OpenSearchServer  # noqa: PLC0415 - likewise

        return OpenSearchServer(connect(self))
