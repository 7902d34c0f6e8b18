"""The index that keeps documents which the target refuses for good, each once."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from typing import TYPE_CHECKING, Final

import elasticsearch
import pyarrow as pa

from epochsink.elasticsearch.bulk_body import action_heads, render
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.errors import Meaning, Refusal, error_type, meaning
from epochsink.errors import RowsRejected
from epochsink.identity import document_id_prefix, identity_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.sink import Epoch, Identity

_PAGE: Final = 1000
_TEXT_ONLY: Final = {"type": "keyword", "index": False, "doc_values": False}
_MAPPING: Final = {
    "dynamic": False,
    "properties": {
        **{name: {"type": "keyword"} for name in ("index", "id", "error", "query_id", "sink", "attempt", "key", "run")},
        "epoch": {"type": "long"},
        "status": {"type": "integer"},
        "rejected_at": {"type": "date"},
        "reason": _TEXT_ONLY,
        "source": _TEXT_ONLY,
    },
}


def ensure(client: elasticsearch.Elasticsearch, index: str) -> None:
    """Create the dead-letter index if it is missing."""
    try:
        client.indices.create(index=index, mappings=_MAPPING)
    except elasticsearch.BadRequestError as error:
        if error_type(error) != "resource_already_exists_exception":
            raise


class DeadLetters:
    """The dead letters of one epoch: their ids depend on the documents' alone, so a replay overwrites them."""

    def __init__(
        self, client: elasticsearch.Elasticsearch, index: str, target: str, identity: Identity, epoch: Epoch
    ) -> None:
        self._client = client
        self._index = index
        self._target = target
        self._identity = identity
        self._epoch = epoch
        self._run = uuid.uuid4().hex
        self._key = identity_key(identity)
        self._heads = action_heads(version=identity.origin["base"] + epoch.number, version_type="external_gte")

    def keep(self, refusals: Sequence[Refusal], timeout: float) -> None:
        """Write refused documents. Raises `GaveUp`, and `RowsRejected` if they are refused here too."""
        for refusal in refusals:
            if meaning(refusal.status, refusal.kind) is Meaning.TOO_LARGE:
                raise RowsRejected(
                    f"document {refusal.id!r} is too large for any index: {refusal.reason}",
                    hint="raise http.max_content_length on the server; the epoch stays pending and is then applied",
                )
        ids = pa.array([self._id(refusal.id) for refusal in refusals])
        documents = pa.array([json.dumps(self._document(refusal)) for refusal in refusals])
        again = Poster(self._client, self._index, timeout).post(render(ids, documents, self._heads))
        if lost := [refusal for refusal in again if not refusal.conflict]:
            raise RowsRejected(
                f"the dead-letter index {self._index!r} refuses {len(lost)} document(s): {lost[0].reason}",
                hint="let check() create that index, or map reason and source as unindexed keywords; the epoch "
                "stays pending and nothing is lost",
            )

    def forget_accepted(self, timeout: float) -> None:
        """Delete dead letters of an earlier, unfinished run at this epoch whose documents were accepted now.

        Raises `GaveUp`.
        """
        poster = Poster(self._client, self._index, timeout)
        while stale := self._stale():
            ids = pa.array([json.dumps({"_id": found})[1:] for found in stale])
            if poster.post(render(ids, pa.nulls(len(stale), pa.string()), self._heads)):
                return  # another driver is at the same epoch, and will do it

    def _stale(self) -> list[str]:
        self._client.indices.refresh(index=self._index)
        mine = [{"term": {"key": self._key}}, {"term": {"epoch": self._epoch.number}}]
        query = {"bool": {"filter": mine, "must_not": {"term": {"run": self._run}}}}
        found = self._client.search(index=self._index, query=query, size=_PAGE, source=False)
        return [hit["_id"] for hit in found["hits"]["hits"]]

    def _id(self, refused: str) -> str:
        digest = hashlib.sha256(refused.encode()).hexdigest()[:32]
        return f'"_id":"{document_id_prefix(self._key, self._epoch.number)}{digest}"}}'

    def _document(self, refusal: Refusal) -> dict[str, object]:
        return {
            "index": self._target,
            "id": refusal.id,
            "source": refusal.source,
            "status": refusal.status,
            "error": refusal.kind,
            "reason": refusal.reason,
            "query_id": self._identity.query_id,
            "sink": self._identity.sink,
            "key": self._key,
            "run": self._run,
            "epoch": self._epoch.number,
            "attempt": self._epoch.attempt,
            "rejected_at": int(time.time() * 1000),
        }
