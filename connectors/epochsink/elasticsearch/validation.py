"""Asking the server whether it would take documents, without writing any.

An operation that demands a sequence number that no document has is parsed against the mapping, goes through
every check of the index, and ends in a version conflict: 409 says that everything else was right. Only
fields that a dynamic mapping adds stay behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.elasticsearch import bulk_body, pipelines
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.errors import GaveUp, UnfitIndex, documents_rejected
from epochsink.errors import PrepareFailed

if TYPE_CHECKING:
    import elasticsearch

    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.elasticsearch.errors import Refusal

_HEADS: Final = bulk_body.action_heads(if_seq_no=2**62, if_primary_term=1)


class Validator:
    """Asks for one task (``validate=True``)."""

    def __init__(self, config: ElasticsearchConfig) -> None:
        self._poster = Poster(connect(config), config.index, config.timeout)
        self._bulk_bytes = config.bulk_bytes

    def validate(self, ids: pa.Array, sources: pa.Array) -> None:
        """Raise `RowsRejected` if the server would refuse some documents, `PrepareFailed` if it cannot be asked."""
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
    """Return what the server would refuse. Raises as `Poster.post` does."""
    return [refusal for refusal in poster.post(request) if not refusal.conflict]


def refused_by_index(client: elasticsearch.Elasticsearch, index: str, poster: Poster) -> list[Refusal]:
    """Return why the index would refuse even an empty document. Raises as `Poster.post` does.

    A pipeline may need fields that an empty document lacks: only one that is missing is the index's fault.
    """
    empty = bulk_body.render(pa.array(['"_id":"epochsink-check"}']), pa.array(["{}"]), _HEADS)
    refused = refused_by_server(poster, empty)
    named = _pipelines(client, index) if refused else []
    return refused if pipelines.missing(client, named) or not named else []


def _pipelines(client: elasticsearch.Elasticsearch, index: str) -> list[str]:
    described = client.indices.get_settings(index=index, flat_settings=True).body.values()
    return [name for each in described for name in pipelines.named(each["settings"])]
