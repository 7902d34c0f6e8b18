"""Keep documents that the target permanently refuses in an index of their own, each once."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch.bulk_body import action_heads, render
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.connection import ensure_index, refresh_all
from epochsink.elasticsearch.errors import Meaning, Refusal, UnfitIndex, meaning
from epochsink.errors import RowsRejected
from epochsink.identity import document_id_prefix, identity_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import elasticsearch

    from epochsink.sink import Epoch, Identity

Hit = dict[str, Any]
"""A letter as a search returns it."""

_PAGE: Final = 1000
# A source may be longer than the longest term of an index.
_TEXT_ONLY: Final = {"type": "keyword", "index": False, "doc_values": False}
_MAPPING: Final = {
    "dynamic": False,
    "properties": {
        **{
            name: {"type": "keyword"}
            for name in ("index", "id", "routing", "error", "query_id", "sink", "attempt", "key", "run")
        },
        "epoch": {"type": "long"},
        "status": {"type": "integer"},
        "rejected_at": {"type": "date"},
        "reason": _TEXT_ONLY,
        "source": _TEXT_ONLY,
    },
}


def ensure(client: elasticsearch.Elasticsearch, index: str) -> None:
    """Create the dead-letter index if it is missing."""
    ensure_index(client, index, mappings=_MAPPING, settings={})


def forget_other_runs(
    client: elasticsearch.Elasticsearch, index: str, identity: Identity, epoch: Epoch, *, run: str, timeout: float
) -> None:
    """Delete the letters of all runs of an epoch except ``run``, which its marker names.

    Raises `GaveUp`, and `UnfitIndex` if letters are still there after the server has accepted their deletion, or if it
    refuses that because another program has changed them.

    Call this after reading the marker: otherwise a driver that was paused could delete its successor's letters.
    """
    mine = [{"term": {"key": identity_key(identity)}}, {"term": {"epoch": epoch.number}}]
    gone: set[tuple[str, str]] = set()
    refused: list[str] = []
    hint = f"delete the letters of this epoch whose run is not {run!r}; then start the query again"
    while True:
        refresh_all(client, index)
        query = {"bool": {"filter": mine, "must_not": [{"term": {"run": run}}, {"ids": {"values": refused}}]}}
        # Else letters in a shard that is not available would look as if they were not there.
        answer = client.search(index=index, query=query, size=_PAGE, source=False, allow_partial_search_results=False)
        found = answer["hits"]["hits"]
        if not found:
            break
        letters = {(hit["_index"], hit["_id"]) for hit in found}
        if again := letters & gone:
            raise UnfitIndex(
                f"dead letters of an interrupted run of epoch {epoch.number} are still in {index!r} after the server "
                f"has accepted to delete them, for example {min(again)[1]!r}",
                f"check the answers of a proxy in front of the server; or {hint}",
            )
        gone |= letters
        if stay := delete(client, found, identity, epoch.number, timeout):
            kept = applied_epochs.read(client, identity)
            if kept is None or (kept.epoch, kept.run) != (epoch.number, run):
                return  # another driver deletes them
            refused += [each.id for each in stay]
    if refused:
        raise UnfitIndex(
            f"{len(refused)} dead letter(s) of an interrupted run of epoch {epoch.number} are still in {index!r}: "
            f"another program has changed them, for example {refused[0]!r}",
            hint,
        )


def delete(
    client: elasticsearch.Elasticsearch, letters: Sequence[Hit], identity: Identity, epoch: int, timeout: float
) -> list[Refusal]:
    """Delete letters of an epoch that a search has found; return what is refused. Raises `GaveUp`."""
    # One version above that of the letters: a late write must not restore them.
    heads = action_heads(version=identity.origin["base"] + epoch + 1, version_type="external_gte")
    refused: list[Refusal] = []
    # Where each one is: an alias that has rolled over passes a delete on to its newest index only.
    for index in sorted({letter["_index"] for letter in letters}):
        ids = pa.array([json.dumps({"_id": each["_id"]})[1:] for each in letters if each["_index"] == index])
        refused += Poster(client, index, timeout).post(render(ids, pa.nulls(len(ids), pa.string()), heads))
    return refused


class DeadLetters:
    """The dead letters of one epoch.

    Each run writes its own letters and does not touch those of other runs: they may belong to a driver that has taken
    over, and may hold other documents. After the marker, which names a run, the letters of all other runs are deleted.
    """

    def __init__(
        self,
        client: elasticsearch.Elasticsearch,
        index: str,
        target: str,
        identity: Identity,
        epoch: Epoch,
        *,
        timeout: float,
        stop_if_overtaken: Callable[[], None],
    ) -> None:
        self._client = client
        self._index = index
        self._target = target
        self._identity = identity
        self._epoch = epoch
        self._key = identity_key(identity)
        self._version = identity.origin["base"] + epoch.number
        self._poster = Poster(client, index, timeout, stop_if_overtaken)

    def keep(self, refusals: Sequence[Refusal], run: str) -> None:
        """Write refused documents of a run. Raises `GaveUp`, and `RowsRejected` if they are refused here too."""
        for refusal in refusals:
            if meaning(refusal.status, refusal.kind) is Meaning.TOO_LARGE:
                raise RowsRejected(
                    "a document is too large for any index",
                    hint="raise http.max_content_length on the server; the epoch stays pending and is then applied",
                    values=f"_id {refusal.id!r}: {refusal.reason}",
                )
        ids = pa.array([self._id(refusal, run) for refusal in refusals])
        documents = pa.array([json.dumps(self._document(refusal, run)) for refusal in refusals])
        heads = action_heads(version=self._version, version_type="external_gte")
        again = self._poster.post(render(ids, documents, heads))
        if lost := [refusal for refusal in again if not refusal.conflict]:
            raise RowsRejected(
                f"the dead-letter index {self._index!r} refuses {len(lost)} document(s)",
                hint="let check() create that index, or map reason and source as unindexed keywords; the epoch "
                "stays pending and nothing is lost",
                values=lost[0].reason,
            )

    def _id(self, refusal: Refusal, run: str) -> str:
        # no _id of a document has a NUL before it
        name = refusal.id or f"\x00{refusal.position}"
        # A digest, because a long _id with the prefix would exceed the limit of 512 bytes.
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        return f'"_id":"{document_id_prefix(self._key, self._epoch.number)}{digest}-{run}"}}'

    def _document(self, refusal: Refusal, run: str) -> dict[str, object]:
        return {
            "index": refusal.place.get("_index", self._target),
            "id": refusal.id or None,
            **{name: value for name, value in refusal.place.items() if name == "routing"},
            "source": refusal.source,
            "status": refusal.status,
            "error": refusal.kind,
            "reason": refusal.reason,
            "query_id": self._identity.query_id,
            "sink": self._identity.sink,
            "key": self._key,
            "run": run,
            "epoch": self._epoch.number,
            "attempt": self._epoch.attempt,
            "rejected_at": int(time.time() * 1000),
        }
