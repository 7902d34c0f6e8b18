"""Compare a sink's configuration with the live server, and create what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import elasticsearch
import pyarrow as pa

from epochsink.elasticsearch import applied_epochs, bulk_body, dead_letter, index_settings, pipelines, target_index
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.config import duration_seconds
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.data_stream import TIMESTAMP, Stream
from epochsink.elasticsearch.errors import (
    CLIENT_ERRORS,
    GaveUp,
    UnfitIndex,
    client_version,
    describe,
    documents_rejected,
    error_type,
)
from epochsink.elasticsearch.mapping import conflicts, from_schema
from epochsink.errors import PrepareFailed, RowsRejected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.elasticsearch.errors import Refusal

_SUPPORTED: Final = (8, 9)
_ASK_ABOUT_SIZE: Final = 1_000_000
_ACTION_LINE: Final = 1_000
_MEMORY: Final = "indexing_pressure.memory.limit"
_NOT_ALLOWED: Final = frozenset({400, 403, 404, 410})
"""Answers about nodes to ignore: the user lacks the privilege, or the server (serverless) lacks the API."""


def findings(client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, schema: pa.Schema | None) -> list[str]:
    """Return one line with a hint for each problem found; without ``schema``, none about columns, and no new index."""
    try:
        # First: the other answers of an unsupported server mean nothing.
        if wrong := _server(client):
            return [wrong]
        # At the start, so that a missing privilege is reported before rows are written.
        applied_epochs.ensure(client)
        if config.dead_letter_index is not None:
            dead_letter.ensure(client, config.dead_letter_index)
        found = _index(client, config, schema) if config.index else _without_index(client, config)
        if config.dead_letter_index is not None:
            found += _writable(client, config.dead_letter_index)
    except CLIENT_ERRORS as error:
        said, hint = describe(error)
        return [f"Elasticsearch at {config.shown_hosts}: {said}; {hint}"]
    return found


def refuse_too_large(client: elasticsearch.Elasticsearch, largest: int) -> None:
    """Raise `RowsRejected` if some node accepts no document of ``largest`` bytes."""
    if largest < _ASK_ABOUT_SIZE:
        return
    # If this user lacks the privilege to ask, the server refuses the document when the epoch is applied.
    for setting, limit in [("http.max_content_length", _longest_request(client)), (_MEMORY, _indexing_memory(client))]:
        if limit is not None and largest + _ACTION_LINE > limit:
            raise RowsRejected(
                f"a document has {largest} bytes, more than the server's {setting} of {limit}",
                hint="leave it out with where=, cut the column in select=, or raise that setting on every node",
            )


def _longest_request(client: elasticsearch.Elasticsearch) -> int | None:
    told = asking(client).nodes.info(metric="http", filter_path="nodes.*.http.max_content_length_in_bytes").body
    return min((node["http"]["max_content_length_in_bytes"] for node in _nodes(told)), default=None)


def _indexing_memory(client: elasticsearch.Elasticsearch) -> int | None:
    """Return how many bytes of operations every node accepts at once. It answers 429 to all larger requests."""
    path = "nodes.*.indexing_pressure.memory.limit_in_bytes"
    told = asking(client).nodes.stats(metric="indexing_pressure", filter_path=path).body
    return min((node["indexing_pressure"]["memory"]["limit_in_bytes"] for node in _nodes(told)), default=None)


def asking(client: elasticsearch.Elasticsearch) -> elasticsearch.Elasticsearch:
    """Return a client for questions that this user, or a serverless cluster, need not answer."""
    return client.options(ignore_status=tuple(_NOT_ALLOWED))


def _nodes(answer: Mapping[str, Any]) -> list[Any]:
    return list(answer.get("nodes", {}).values())


def _server(client: elasticsearch.Elasticsearch) -> str | None:
    version = version_of(client)
    if version is None:
        return None
    major, own = int(version.split(".")[0]), int(elasticsearch.__version__[0])
    if major not in _SUPPORTED:
        return f"the server is version {version}; supported are 8 and 9: upgrade it"
    if own > major:
        return (
            f"the server is version {version}, the Python client {client_version()}: install the client of "
            f"the server's major version (elasticsearch>={major},<{major + 1})"
        )
    return None


def version_of(client: elasticsearch.Elasticsearch) -> str | None:
    """Return the server's version, or None if the user lacks the privilege to ask."""
    try:
        nodes = client.nodes.info(node_id="_local", filter_path="nodes.*.version").body
        return next((str(node["version"]) for node in nodes.get("nodes", {}).values()), None)
    except elasticsearch.ApiError as error:
        if error.status_code not in _NOT_ALLOWED:
            raise
        _refuse_newer_client(client)
        return None


def _refuse_newer_client(client: elasticsearch.Elasticsearch) -> None:
    """Raise an older server's error for this client. Sends a new request, because filter_path removes the reason."""
    try:
        client.nodes.info(node_id="_local")
    except elasticsearch.ApiError as error:
        if error_type(error) == "media_type_header_exception":
            raise


def _index(client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, schema: pa.Schema | None) -> list[str]:
    try:
        found = target_index.find(client, config, "mappings")
        if found is None and config.create:
            if schema is None:
                return []
            client.indices.create(index=config.index, settings=_settings(config), mappings=from_schema(schema))
            found = target_index.find(client, config, "mappings")
    except UnfitIndex as error:
        return [str(error)]
    if found is None:
        return [str(target_index.missing(config.index))]
    unfit = [str(each) for each in target_index.unfit_settings(found, config)]
    named = pipelines.named(found.settings, config.pipeline)
    unfit += [str(each) for each in pipelines.moving(client, found.index, named, config.pipeline)]
    # A data stream refuses what is sent here, so ask the index behind it.
    written = found.written if isinstance(found, Stream) else config.index
    if isinstance(found, Stream) and schema is not None and TIMESTAMP not in schema.names:
        unfit.append(
            f"every document of the data stream {found.index!r} needs the field {TIMESTAMP!r}, which the rows lack: "
            f"name it in select=, e.g. select=['*', 'created_at AS `{TIMESTAMP}`']"
        )
    return [
        *unfit,
        *(conflicts(schema, found.mapping) if schema is not None else ()),
        *_writable(client, written, config.pipeline, routed=config.routing is not None),
    ]


def _without_index(client: elasticsearch.Elasticsearch, config: ElasticsearchConfig) -> list[str]:
    """Return what is wrong with ``pipeline=`` and the dead-letter index; each vote looks at those of ``index_by``."""
    try:
        target_index.find_each(client, config, ())
    except UnfitIndex as error:
        return [str(error)]
    named = pipelines.named({}, config.pipeline)
    found = [str(each) for each in pipelines.moving(client, config.shown_index, named, config.pipeline)]
    absent = pipelines.missing(client, named)
    return found + [f"the ingest pipeline {name!r} does not exist: create it, or correct pipeline=" for name in absent]


def create_index(
    client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, schema: pa.Schema | None, name: str
) -> None:
    """Create an index that rows name: from the stream's schema, or (``create=False``) as the server's templates say."""
    settings = _settings(config) if config.create else None
    mappings = from_schema(schema) if config.create and schema is not None else None
    try:
        client.indices.create(index=name, settings=settings, mappings=mappings)
    except elasticsearch.BadRequestError as error:
        # Another driver has been faster.
        if error_type(error) != "resource_already_exists_exception":
            raise


def _settings(config: ElasticsearchConfig) -> dict[str, Any]:
    settings = config.index_settings
    if config.delete_when is not None and duration_seconds(config.gc_deletes) != duration_seconds(
        index_settings.SERVER_GC_DELETES
    ):
        # Leave the default out: serverless does not support this setting.
        settings["index.gc_deletes"] = config.gc_deletes
    return settings


def _writable(
    client: elasticsearch.Elasticsearch, index: str, pipeline: str | None = None, *, routed: bool = False
) -> list[str]:
    """Send a write that always conflicts. It needs the same privileges as a real one, and an open index."""
    try:
        poster = Poster(client, index, timeout=10, pipeline=pipeline)
        refused = refused_by_index(client, index, poster, pipeline, routed=routed)
    except UnfitIndex as error:
        return [str(error)]
    except GaveUp as error:
        return [f"{error}: find out why the server is overloaded or the index unavailable, then start again"]
    hint = "check its mapping and pipelines"
    return [f"index {index!r} refuses an empty document: {each.reason}: {hint}" for each in refused]


# An operation conditional on a sequence number that no document has is parsed with the mapping and passes every check
# of the index, then ends in a version conflict. So 409 means that all else is right. Only fields that a dynamic mapping
# adds remain.
_HEADS: Final = bulk_body.action_heads(if_seq_no=2**62, if_primary_term=1)


class Validator:
    """Validates the documents of one task (``validate=True``)."""

    def __init__(self, config: ElasticsearchConfig) -> None:
        self._poster = Poster(connect(config), config.index, config.timeout, pipeline=config.pipeline)
        self._bulk_bytes = config.bulk_bytes

    def validate(self, ids: pa.Array, sources: pa.Array) -> None:
        """Raise `RowsRejected` if the server would refuse documents, `PrepareFailed` if it does not answer."""
        try:
            for request in bulk_body.cut(bulk_body.render(ids, sources, _HEADS), self._bulk_bytes):
                if refused := refused_by_server(self._poster, request):
                    state = "validate=True found it before the checkpoint; nothing was written"
                    raise documents_rejected(refused, state)
        except GaveUp as error:
            raise PrepareFailed(f"the server could not validate the rows: {error}") from error
        except UnfitIndex as error:
            raise PrepareFailed(error.message, hint=error.hint, may_pass=False) from error


def refused_by_server(poster: Poster, request: bulk_body.Request) -> list[Refusal]:
    """Return the operations that the server would refuse. Raises as `Poster.post` does."""
    return [refusal for refusal in poster.post(request) if not refusal.conflict]


def refused_by_index(
    client: elasticsearch.Elasticsearch,
    index: str,
    poster: Poster,
    pipeline: str | None = None,
    *,
    routed: bool = False,
) -> list[Refusal]:
    """Return the reasons why the index would refuse even an empty document. Raises as `Poster.post` does.

    ``poster`` is for this alone, ``pipeline`` is its pipeline; ``routed`` is whether documents have a routing, which an
    index may require. A pipeline may fail because an empty document lacks fields. That does not count; a missing
    pipeline does, and what the index refuses if the document passes no pipeline.
    """
    end = '"routing":"epochsink","_id":"epochsink-check"}' if routed else '"_id":"epochsink-check"}'
    empty = bulk_body.render(pa.array([end]), pa.array(["{}"]), _HEADS)

    def refusals() -> list[Refusal]:
        # Each document of a data stream needs a timestamp: the index has read the document, and takes others.
        return [each for each in refused_by_server(poster, empty) if f"[{TIMESTAMP}]" not in each.reason]

    if not (refused := refusals()):
        return []
    described = client.indices.get_settings(index=index, flat_settings=True).body.values()
    settings = [each["settings"] for each in described]
    named = [name for each in settings for name in pipelines.named(each, pipeline)]
    # The reason first: a user without the privilege read_pipeline cannot ask whether a pipeline exists.
    if not named or any(pipelines.is_missing(each.reason) for each in refused) or pipelines.missing(client, named):
        return refused
    # No request can leave a final pipeline out.
    if any(pipelines.has_final(each) for each in settings):
        return []
    poster.pipeline = pipelines.NONE
    return refusals()
