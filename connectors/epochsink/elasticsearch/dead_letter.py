"""Keep documents that the target permanently refuses in an index of their own, each once.

A letter has the row twice: ``row`` is what the sink's writer was given, from which a retry writes it, and ``source`` is
the document, for people.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from epochsink.elasticsearch import applied_epochs
from epochsink.elasticsearch.bulk_body import action_heads, render
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.errors import Meaning, Refusal, UnfitIndex, meaning
from epochsink.elasticsearch.indices import ensure_index, refresh_all
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.unfit import document_of
from epochsink.errors import RowsRejected
from epochsink.identity import document_id_prefix
from epochsink.retry import Clock
from epochsink.sink import Epoch, Identity, identity_key
from epochsink.sink.letter_row import decode_rows, encode_row

Hit = dict[str, Any]
"""A letter as a search returns it."""

_PAGE: Final = 1000
_LONGEST_SOURCE: Final = 100_000
"""The rest of a longer document is in the row alone: a letter must not be larger than what the server accepts."""
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
        "row": {"type": "binary"},
    },
}


def ensure(server: ElasticsearchServer, index: str) -> bool:
    """Create the dead-letter index if it is missing; return whether it exists, as `ensure_index`."""
    return ensure_index(server, index, mappings=_MAPPING, settings={})


def forget_other_runs(
    server: ElasticsearchServer, index: str, identity: Identity, epoch: Epoch, *, run: str, timeout: float
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
        refresh_all(server, index)
        query = {"bool": {"filter": mine, "must_not": [{"term": {"run": run}}, {"ids": {"values": refused}}]}}
        hits = server.search(index, query, _PAGE, source=False).hits
        if not hits:
            break
        letters = {(hit["_index"], hit["_id"]) for hit in hits}
        if again := letters & gone:
            raise UnfitIndex(
                f"dead letters of an interrupted run of epoch {epoch.number} are still in {index!r} after the server "
                f"has accepted to delete them, for example {min(again)[1]!r}",
                f"check the answers of a proxy in front of the server; or {hint}",
            )
        gone |= letters
        if stay := delete(server, hits, identity, epoch.number, timeout):
            kept = applied_epochs.read(server, identity)
            if kept is None or (kept.epoch, kept.run) != (epoch.number, run):
                return  # another driver deletes them
            refused += [each.id for each in stay]
    if refused:
        raise UnfitIndex(
            f"{len(refused)} dead letter(s) of an interrupted run of epoch {epoch.number} are still in {index!r}: "
            f"another program has changed them, for example {refused[0]!r}",
            hint,
        )


def with_letters(server: ElasticsearchServer, index: str, runs: Mapping[str, int]) -> dict[str, int]:
    """Return those of the runs that have letters."""
    refresh_all(server, index)
    return {run: epoch for run, epoch in runs.items() if server.count(index, {"term": {"run": run}})}


def delete(
    server: ElasticsearchServer, letters: Sequence[Hit], identity: Identity, epoch: int, timeout: float
) -> list[Refusal]:
    """Delete letters of an epoch that a search has found; return what is refused. Raises `GaveUp`."""
    # One version above that of the letters: a late write must not restore them.
    heads = action_heads(version=identity.origin["base"] + epoch + 1, version_type="external_gte")
    refused: list[Refusal] = []
    # Where each one is: an alias that has rolled over passes a delete on to its newest index only.
    for index in sorted({letter["_index"] for letter in letters}):
        ids = pa.array([json.dumps({"_id": each["_id"]})[1:] for each in letters if each["_index"] == index])
        refused += Poster(server, index, timeout, counted=True).post(
            render(ids, pa.nulls(len(ids), pa.string()), heads)
        )
    return refused


class DeadLetters:
    """The dead letters of one epoch.

    Each run writes its own letters and does not touch those of other runs: they may belong to a driver that has taken
    over, and may hold other documents. After the marker, which names a run, the letters of all other runs are deleted.
    """

    def __init__(
        self,
        server: ElasticsearchServer,
        index: str,
        target: str | None,
        identity: Identity,
        epoch: Epoch,
        *,
        timeout: float,
        clock: Clock,
        stop_if_overtaken: Callable[[], None],
    ) -> None:
        self._server = server
        self._index = index
        self._target = target
        self._identity = identity
        self._epoch = epoch
        self._key = identity_key(identity)
        self._version = identity.origin["base"] + epoch.number
        self._clock = clock
        self._poster = Poster(server, index, timeout, stop_if_overtaken, counted=True)

    def keep(self, refusals: Sequence[Refusal], run: str) -> None:
        """Write refused documents of a run. Raises `GaveUp`, and `RowsRejected` if they are refused here too."""
        ids = pa.array([self._id(refusal, run) for refusal in refusals])
        documents = pa.array([json.dumps(self._document(refusal, run)) for refusal in refusals])
        heads = action_heads(version=self._version, version_type="external_gte")
        again = self._poster.post(render(ids, documents, heads))
        if lost := [refusal for refusal in again if not refusal.conflict]:
            if any(meaning(refusal.status, refusal.kind) is Meaning.TOO_LARGE for refusal in lost):
                raise RowsRejected(
                    "a document is too large for any index, and so is its dead letter",
                    hint="raise http.max_content_length on the server, and the limit of a proxy in front of it; the "
                    "epoch stays pending and is then applied",
                    values=lost[0].reason,
                )
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
            "index": refusal.place.get("_index", self._target),  # None: the row names no index
            "id": refusal.id or None,
            **{name: value for name, value in refusal.place.items() if name == "routing"},
            "source": refusal.source and refusal.source[:_LONGEST_SOURCE],
            "row": _encoded(refusal.row),
            "status": refusal.status,
            "error": refusal.kind,
            "reason": refusal.reason,
            "query_id": self._identity.query_id,
            "sink": self._identity.sink,
            "key": self._key,
            "run": run,
            "epoch": self._epoch.number,
            "attempt": self._epoch.attempt,
            "rejected_at": int(self._clock.time() * 1000),
        }


def _encoded(row: pa.Table | None) -> str | None:
    if row is None:
        return None
    (batch,) = row.combine_chunks().to_batches()
    return base64.b64encode(zlib.compress(encode_row(batch))).decode()


def of_size(row: pa.RecordBatch) -> str:
    """Return a document that is about as long as the letter of a row."""
    source = document_of(row["source"][0].as_py()) or ""
    return json.dumps({"row": _encoded(pa.Table.from_batches([row])), "source": source[:_LONGEST_SOURCE]})


def decoded(letter: Mapping[str, Any]) -> pa.RecordBatch:
    """Return the row of a letter. Raises `ValueError` if it has none."""
    try:
        (row,) = decode_rows([zlib.decompress(base64.b64decode(letter.get("row") or ""))])
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return row
