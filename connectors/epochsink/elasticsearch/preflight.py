"""Compare a sink's configuration with the live server, and create what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from epochsink.elasticsearch import applied_epochs, bulk_body, dead_letter, index_settings, pipelines, target_index
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.config import ElasticsearchConfig, duration_seconds
from epochsink.elasticsearch.data_stream import TIMESTAMP
from epochsink.elasticsearch.errors import (
    CLIENT_ERRORS,
    GaveUp,
    Meaning,
    Refusal,
    RequestRefused,
    UnfitIndex,
    describe,
    documents_rejected,
    explained,
    is_passing,
    meaning,
)
from epochsink.elasticsearch.mapping import conflicts, from_schema, is_ours, unmapped
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.sink import would

ASK_ABOUT_SIZE: Final = 1_000_000
"""Smaller documents pass, in bytes."""
_ACTION_LINE: Final = 1_000
_MEMORY: Final = "indexing_pressure.memory.limit"


def findings(server: ElasticsearchServer, config: ElasticsearchConfig, schema: pa.Schema | None) -> list[str]:
    """Return one line with a hint for each problem found; without ``schema``, none about columns, and no new index."""
    try:
        # First: the other answers of an unsupported server mean nothing.
        if wrong := _server(server):
            return [wrong]
        # At the start, so that a missing privilege is reported before rows are written.
        applied_epochs.ensure(server)
        letters = config.dead_letter_index
        has_letters = letters is not None and dead_letter.ensure(server, letters)
        reasons = _index(server, config, schema) if config.index else _without_index(server, config)
        # The trial write would create a missing index.
        if letters is not None and has_letters:
            reasons += _writable(server, letters)
    except CLIENT_ERRORS as error:
        reason, hint = describe(error)
        return [f"{config.product} at {config.shown_hosts}: {reason}; {hint}"]
    return reasons


def refuse_too_large(server: ElasticsearchServer, largest: int) -> None:
    """Raise `RowsRejected` if some node accepts no document of ``largest`` bytes."""
    if largest < ASK_ABOUT_SIZE:
        return
    # If this user lacks the privilege to ask, the server refuses the document when the epoch is applied.
    for setting, limits in [("http.max_content_length", server.request_limits()), (_MEMORY, server.memory_limits())]:
        if limits and largest + _ACTION_LINE > min(limits):
            raise RowsRejected(
                f"a document has {largest} bytes, more than the server's {setting} of {min(limits)}",
                hint="leave it out with where=, cut the column in select=, or raise that setting on every node",
            )


def refuse_on_the_way(
    server: ElasticsearchServer, config: ElasticsearchConfig, index: str, row: pa.RecordBatch
) -> None:
    """Raise `RowsRejected` if neither a row's document nor its dead letter reaches the server through its proxy.

    Both are sent on a condition that never holds. ``index`` as in `Poster`. Raises `PrepareFailed`.
    """
    if bulk_body.unfit(row):
        return  # no request will hold its document
    end = pa.array(['"_id":"epochsink-check"}'])
    ids = bulk_body.action_ends(row, row["id"] if "id" in row.schema.names else end)
    # counted: else the answer would be asked for a second time, and the document sent again
    trials = [(Poster(server, index, config.timeout, pipeline=config.pipeline, counted=True), ids, row["source"])]
    if config.dead_letter_index is not None:
        letter = pa.array([dead_letter.of_size(row)])
        trials.append((Poster(server, config.dead_letter_index, config.timeout, counted=True), end, letter))
    try:
        if not all(_is_too_large(poster, bulk_body.render(ends, sources, _HEADS)) for poster, ends, sources in trials):
            return
    except GaveUp as error:
        raise PrepareFailed(f"the server did not say whether it takes the longest document: {error}") from error
    raise RowsRejected(
        f"a document has {pc.binary_length(row['source'])[0]} bytes, more than a proxy in front of the server accepts",
        hint="leave it out with where=, cut the column in select=, or raise the limit of the proxy",
    )


def _is_too_large(poster: Poster, request: bulk_body.Request) -> bool:
    return any(meaning(each.status, each.kind) is Meaning.TOO_LARGE for each in poster.post(request))


def _server(server: ElasticsearchServer) -> str | None:
    version = server.version()
    if version is None:
        return None
    supported = server.client.majors
    if int(version.split(".")[0]) not in supported:
        return (
            f"the server is version {version}; supported are {' and '.join(map(str, supported))}: upgrade it, or use "
            "the sink for its product (Elasticsearch, OpenSearch)"
        )
    return server.client.wrong_version(version)


def _index(server: ElasticsearchServer, config: ElasticsearchConfig, schema: pa.Schema | None) -> list[str]:
    try:
        target = target_index.find(server, config)
        if target is None and config.create:
            if schema is None:
                return []
            if would(f"create the index {config.index!r} with a mapping of the columns {', '.join(schema.names)}"):
                return []
            create_index(server, config, schema, config.index)
            target = target_index.find(server, config)
    except (UnfitIndex, PrepareFailed) as error:
        return [f"{error.message}: {error.hint}"]
    if target is None:
        return [str(target_index.missing(config.index))]
    unfit = [str(each) for each in target.unfit_settings(config)]
    if schema is not None:
        unfit += target.unfit_columns(schema.names)
    try:
        for index, settings in target.written.items():
            unfit += unfit_for_rows(server, config, schema, index, settings)
    except GaveUp as error:
        unfit.append(f"{error}: find out why the server is overloaded or the index unavailable, then start again")
    return unfit


def unfit_for_rows(
    server: ElasticsearchServer,
    config: ElasticsearchConfig,
    schema: pa.Schema | None,
    index: str,
    settings: Mapping[str, str],
) -> list[str]:
    """Return why an index would not take rows of a schema as `check` promises; for each index that rows go to.

    First, columns that an index lacks whose mapping we made are added to it: the server would map them by their first
    values, and refuse later ones. Raises `GaveUp`.
    """
    mapping = server.mapping(index)
    unfit: list[str] = []
    if schema is not None and is_ours(mapping) and (added := unmapped(schema, mapping)):
        # As if they were there: a strict mapping takes no others.
        mapping = {**mapping, "dynamic": "true"}
        try:
            if not would(f"add to the mapping of index {index!r} the column(s) {', '.join(added)}"):
                server.add_to_mapping(index, added)
        except RequestRefused as error:
            if is_passing(error):
                raise
            request = f"PUT /{index}/_mapping {json.dumps({'properties': added})}"
            unfit.append(
                f"index {index!r} lacks the column(s) {', '.join(map(repr, added))}, and their mapping cannot be "
                f"added: {describe(error)[0]}; add it as a user with the privilege manage: {request}"
            )
    named = pipelines.named(settings, config.pipeline)
    unfit += [str(each) for each in pipelines.moving(server, index, named, config.pipeline)]
    unfit += conflicts(schema, mapping) if schema is not None else ()
    try:
        unfit += _refuses_empty(server, index, config.pipeline, routed=config.routing is not None)
    except UnfitIndex as error:
        unfit.append(str(error))
    return unfit


def _without_index(server: ElasticsearchServer, config: ElasticsearchConfig) -> list[str]:
    """Return what is wrong with ``pipeline=`` and the dead-letter index; each vote looks at those of ``index_by``."""
    try:
        target_index.find_each(server, config, ())
    except UnfitIndex as error:
        return [str(error)]
    named = pipelines.named({}, config.pipeline)
    moving = [str(each) for each in pipelines.moving(server, config.shown_index, named, config.pipeline)]
    absent = pipelines.missing(server, named)
    return moving + [f"the ingest pipeline {name!r} does not exist: create it, or correct pipeline=" for name in absent]


def create_index(server: ElasticsearchServer, config: ElasticsearchConfig, schema: pa.Schema | None, name: str) -> None:
    """Create an index from the stream's schema, or (``create=False``) as the server's templates say.

    Raises `PrepareFailed`.
    """
    settings = _settings(config) if config.create else None
    mappings = from_schema(schema) if config.create and schema is not None else None
    with explained(PrepareFailed, f"creating index {name!r}"):
        # It may exist: another driver has been faster.
        server.create_index(name, settings, mappings)


def _settings(config: ElasticsearchConfig) -> dict[str, Any]:
    settings = config.index_settings
    if config.delete_when is not None and duration_seconds(config.gc_deletes) != duration_seconds(
        index_settings.SERVER_GC_DELETES
    ):
        # Leave the default out: serverless does not support this setting.
        settings["index.gc_deletes"] = config.gc_deletes
    return settings


def _writable(server: ElasticsearchServer, index: str) -> list[str]:
    """Return why the index of dead letters takes no writes."""
    try:
        return _refuses_empty(server, index)
    except UnfitIndex as error:
        return [str(error)]
    except GaveUp as error:
        return [f"{error}: find out why the server is overloaded or the index unavailable, then start again"]


def _refuses_empty(
    server: ElasticsearchServer, index: str, pipeline: str | None = None, *, routed: bool = False
) -> list[str]:
    """Send a write that always conflicts. It needs the same privileges as a real one, and an open index."""
    refused = refused_by_index(server, index, Poster(server, index, 10, pipeline=pipeline), pipeline, routed=routed)
    hint = "check its mapping and pipelines"
    return [f"index {index!r} refuses an empty document: {each.reason}: {hint}" for each in refused]


# An operation conditional on a sequence number that no document has is parsed with the mapping and passes every check
# of the index, then ends in a version conflict. So 409 means that all else is right. Only fields that a dynamic mapping
# adds remain.
_HEADS: Final = bulk_body.action_heads(if_seq_no=2**62, if_primary_term=1)


class Validator:
    """Validates the documents of one task (``validate=True``)."""

    def __init__(self, server: ElasticsearchServer, config: ElasticsearchConfig) -> None:
        self._poster = Poster(server, config.index, config.timeout, pipeline=config.pipeline)
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
    server: ElasticsearchServer,
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
        quoted = (f"[{TIMESTAMP}]", f"'{TIMESTAMP}'")  # the latter by OpenSearch
        return [each for each in refused_by_server(poster, empty) if not any(name in each.reason for name in quoted)]

    if not (refused := refusals()):
        return []
    settings = server.settings(index)
    named = [name for each in settings for name in pipelines.named(each, pipeline)]
    # The reason first: a user without the privilege read_pipeline cannot ask whether a pipeline exists.
    if not named or any(pipelines.is_missing(each.reason) for each in refused) or pipelines.missing(server, named):
        return refused
    # No request can leave a final pipeline out.
    if any(pipelines.has_final(each) for each in settings):
        return []
    poster.pipeline = pipelines.NONE
    return refusals()
