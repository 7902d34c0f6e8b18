"""Show an operator the dead letters of an index, and retry or drop them.

A retry writes a document as its epoch would have: with the same ``_id`` and the same version. Then it deletes the
letter. Killed in between, or done twice at once, it stores the same document again; a document that a later epoch has
written has a higher version and stays. So does one that another program has changed, which raises its version. If the
version is above those of all epochs, the letter stays, too: its row may be the newer one. In a data stream, which has
no versions, a retry first looks for the documents that are there, in every backing index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink.elasticsearch import applied_epochs, bulk_body, dead_letter, deduplicate, target_index
from epochsink.elasticsearch.applied_epochs import MarkerDocument
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.changed_elsewhere import stored_versions
from epochsink.elasticsearch.config import MARKERS, ElasticsearchConfig, is_index_name
from epochsink.elasticsearch.data_stream import Copies, Created
from epochsink.elasticsearch.dead_letter import Hit, delete
from epochsink.elasticsearch.errors import CLIENT_ERRORS, GaveUp, Refusal, UnfitIndex, explained, is_passing
from epochsink.elasticsearch.indices import refresh_all
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.target import ElasticsearchTarget
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.retry import Clock, RetryPolicy, retrying
from epochsink.sink import Chosen, Identity, Letter, Letters, Retried, identity_key

if TYPE_CHECKING:
    Write = Callable[[pa.RecordBatch, pa.Array, int], tuple[list[Refusal], Collection[str]]]
    """Writes rows of an epoch, under ``_id`` as in an action line. Returns those that are refused, and the ids of those
    that are superseded."""

_PAGE: Final = 500
_WINDOW: Final = 10_000
"""The most hits that one search may return."""
_TURNS: Final = 3
_CHANGED: Final = (
    "the version of the stored document is above those of all applied epochs: another program has changed or deleted "
    "it, or an epoch is being applied; compare both, write the row by hand if it is the newer one, and drop the letter"
)


class ElasticsearchLetters(Letters):
    """The letters of one sink in the dead-letter index ``index``."""

    def __init__(
        self, server: ElasticsearchServer, clock: Clock, config: ElasticsearchConfig, identity: Identity, index: str
    ) -> None:
        self._server = server
        self._clock = clock
        self._config = config
        self._identity = identity
        self._index = index

    def read(self, chosen: Chosen, limit: int) -> list[Letter]:
        """Return the newest letters, also those of an epoch that is not applied yet, once each."""
        with self._explained("reading"):
            kept = applied_epochs.read(self._server, self._identity)
            self._refresh()
            query = self._query(chosen, [*_counting(kept), self._pending(kept)])
            newest = [{"epoch": "desc"}, {"rejected_at": "desc"}]
            hits = self._server.search(self._index, query, min(limit, _WINDOW), sort=newest).hits
        letters: dict[str, Letter] = {}
        for hit in hits:
            # each run at a pending epoch has written letters, whose ids end in the run
            name = hit["_id"].removesuffix(hit["_source"]["run"])
            letters.setdefault(name, _letter(hit, kept))
        return list(letters.values())

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters of applied epochs."""
        with self._explained("counting"):
            self._refresh()
            kept = applied_epochs.read(self._server, self._identity)
            return self._server.count(self._index, self._query(chosen, _counting(kept)))

    def caution(self) -> str:
        """Say which stored documents a retry replaces."""
        if not self._config.key:
            return ""
        text = (
            "a document stays if its version is above that of the letter's epoch, because a later epoch has written "
            "its key, or another program has changed it often (each change raises the version by one): its letter is "
            "deleted, unless the version shows that no epoch can have written it; after fewer changes by another "
            "program it is replaced, so compare such documents first"
        )
        if self._config.delete_when:
            # the server keeps the versions of deleted documents in memory
            text += (
                f"; one that a later epoch deleted is added again if that was more than {self._config.gc_deletes} ago "
                "(gc_deletes=), or if the primary shard has restarted or moved since"
            )
        return text

    def drop(self, chosen: Chosen) -> int:
        """Delete letters of applied epochs."""
        dropped = 0
        with self._explained("deleting"):
            for epoch, hits in self._applied(chosen, applied_epochs.read(self._server, self._identity)):
                dropped += len(hits) - len(self._delete(epoch, hits))
        return dropped

    def retry(self, chosen: Chosen) -> Retried:
        """Write the documents of letters of applied epochs, then delete the letters."""
        retried = Retried()
        with self._explained("retrying"):
            kept = applied_epochs.read(self._server, self._identity)
            if kept is None:
                return retried
            write = self._writer(kept)
            for epoch, hits in self._applied(chosen, kept):
                retried += self._retry(write, epoch, hits)
            if self._config.refresh and self._config.index and retried.written:
                refresh_all(self._server, self._config.index)
        return retried

    def _writer(self, kept: MarkerDocument) -> Write:
        """Return what writes documents to the index, which must be the one that the marker names, or accepted.

        Raises `WentBack`.
        """
        config, target = self._config, self._target(kept)
        if target.appends:
            return lambda rows, ids, _: (self._append(kept, rows, ids), ())  # it has no versions
        # Even if ``target`` has no pipeline: it may get one during the retry, and letters may be for other indices than
        # those of the newest epoch.
        at = target.posted_to
        poster = Poster(self._server, at, config.timeout, pipeline=config.pipeline, stored_in=target.index)

        def write(rows: pa.RecordBatch, ids: pa.Array, epoch: int) -> tuple[list[Refusal], Collection[str]]:
            version = self._identity.origin["base"] + epoch
            heads = bulk_body.action_heads(version=version, version_type="external_gte")
            refused = poster.post(bulk_body.render(bulk_body.action_ends(rows, ids), rows["source"], heads))
            return refused, self._superseded([each for each in refused if each.conflict], at)

        return write

    def _append(self, kept: MarkerDocument, rows: pa.RecordBatch, ids: pa.Array) -> list[Refusal]:
        """Append the documents that no backing index has, and again if the stream rolls over; return refused ones."""
        config = self._config
        created = Created(config.index)
        poster = Poster(self._server, config.index, config.timeout, pipeline=config.pipeline, created=created)
        stream = self._target(kept)
        names = [json.loads(f"{{{end}")["_id"] for end in ids.to_pylist()]
        for _ in range(_TURNS):
            stored = self._patiently(Copies(self._server, stream).stored, names)
            missing = pa.array([name not in stored for name in names], pa.bool_())
            heads = bulk_body.create_heads()
            refused = poster.post(bulk_body.render(ids.filter(missing), rows["source"].filter(missing), heads))
            before, stream = stream, self._target(kept)
            created.require_within(stream.indices)
            if stream.indices == before.indices:
                # a document that another retry has appended is the one to write
                return [each for each in refused if not each.conflict]
        raise OutcomeUnknown(
            f"the data stream {config.index!r} rolled over in each of {_TURNS} attempts to append to it",
            hint="type it again: what is done is not done twice",
        )

    def _target(self, kept: MarkerDocument) -> ElasticsearchTarget:
        """Return what the marker names; of a data stream all backing indices: a retry may have appended to any.

        If an operator has accepted another index since, return that one.
        """
        trusted = applied_epochs.trusted(kept, self.applied)
        if self._config.index:
            return self._patiently(target_index.require_same, self._server, self._config, trusted)
        names: Iterable[str] = () if trusted is None else trusted.indices
        return self._patiently(target_index.require_each, self._server, self._config, trusted, names)

    def _retry(self, write: Write, epoch: int, hits: Sequence[Hit]) -> Retried:
        reasons: dict[str, str] = {}
        superseded: set[str] = set()
        existing = {} if self._config.index else self._existing({hit["_source"]["index"] for hit in hits})
        writable = []
        for hit in hits:
            row, wrong = self._row(hit["_source"], existing)
            if row is None:
                reasons[hit["_id"]] = wrong
            else:
                writable.append((hit, row))
        for _, alike in groupby(writable, lambda pair: pair[1].schema):
            chosen, rows = zip(*alike, strict=True)
            stay, newer = self._write(
                write, epoch, chosen, pa.Table.from_batches(rows).combine_chunks().to_batches()[0]
            )
            reasons |= stay
            superseded |= newer
        reach("elasticsearch.letters.written")
        for stays in self._delete(epoch, [hit for hit in hits if hit["_id"] not in reasons]):
            reasons[stays.id] = f"its row is written, but the letter cannot be deleted: {stays.reason}"
        superseded -= reasons.keys()
        written = len(hits) - len(reasons) - len(superseded)
        return Retried(written, len(superseded), len(reasons), next(iter(reasons.values()), ""))

    def _write(
        self, write: Write, epoch: int, hits: Sequence[Hit], rows: pa.RecordBatch
    ) -> tuple[dict[str, str], set[str]]:
        """Write the rows of letters as the epoch would have.

        Return the letters that stay, each with the reason, and those whose row a newer one supersedes.
        """
        wrong = bulk_body.unfit(rows)
        reasons = {hits[place]["_id"]: each.reason for place, each in wrong.items()}
        ids = rows["id"] if "id" in rows.schema.names else _ends(hit["_source"]["id"] or "" for hit in hits)
        if not self._config.index and "index" not in rows.schema.names:
            rows = rows.append_column("index", pa.array([hit["_source"]["index"] for hit in hits], pa.string()))
        fit = [place for place in range(len(rows)) if place not in wrong]
        newest = _newest(rows, ids, fit)
        superseded = {hits[place]["_id"] for place in set(fit).difference(newest)}
        if not newest:
            return reasons, superseded
        rows, ids = rows.take(pa.array(newest)), ids.take(pa.array(newest))
        letters = dict(zip(_names(rows, ids), (hits[place]["_id"] for place in newest), strict=True))
        refusals, newer = write(rows, ids, epoch)
        for refused in refusals:
            letter = letters[refused.id, refused.place.get("_index", "")]
            if refused.id in newer:
                superseded.add(letter)
            else:
                reasons[letter] = _CHANGED if refused.conflict else refused.reason
        return reasons, superseded

    def _superseded(self, conflicts: Sequence[Refusal], index: str) -> Collection[str]:
        """Return the ids whose documents a later epoch may have written or deleted.

        Each change by another program raises a version by one. Up to the version of the newest epoch, a document that
        such a program has changed looks like one that an epoch has written.
        """
        if not conflicts or not self._config.key:
            # Without a key only its own epoch writes a document: it is there, and was changed afterwards.
            return {each.id for each in conflicts}
        stored = self._patiently(stored_versions, self._server, index, conflicts)
        # After reading the versions: otherwise an epoch of the running query would look like another program.
        kept = self._patiently(applied_epochs.read, self._server, self._identity)
        newest = self._identity.origin["base"] + (-1 if kept is None else kept.epoch)
        deletes = self._config.delete_when is not None
        return {each.id for each in conflicts if (stored[each.id] <= newest if each.id in stored else deletes)}

    def _row(self, letter: Mapping[str, Any], existing: Mapping[str, str]) -> tuple[pa.RecordBatch | None, str]:
        """Return the row of a letter, or why it cannot be written. ``existing`` is what `_existing` returns."""
        wrong = ""
        if not self._config.index:
            # without this, the server would create it, without the mapping of the sink
            wrong = existing.get(letter["index"], f"there is no index {letter['index']!r} for documents")
        elif letter["index"] != self._config.index:
            wrong = f"it was for the index {letter['index']!r}, and the sink writes to {self._config.index!r} now"
        try:
            row = dead_letter.decoded(letter)
        except ValueError as error:
            return None, f"its row cannot be read, another program may have changed the letter: {error}"
        return (None, wrong) if wrong else (row, "")

    def _existing(self, names: Iterable[str | None]) -> dict[str, str]:
        """Return the existing indices for documents, and why letters for one of them cannot be written, "" if they can.

        Raises `UnfitIndex` if an index does not keep documents as promised.
        """
        faults: dict[str, str] = {}
        for name in names:
            if name is None or not is_index_name(name) or name in (self._index, MARKERS):
                continue
            try:
                target = target_index.find_each(self._server, self._config, [name])
            except UnfitIndex as error:
                # an alias by now
                faults[name] = error.message
                continue
            if name in target.settings:
                # `_target` has checked the indices of the newest epoch only.
                for unfit in target.unfit_settings(self._config):
                    raise unfit
                faults[name] = ""
        return faults

    def _applied(self, chosen: Chosen, kept: MarkerDocument | None) -> Iterator[tuple[int, list[Hit]]]:
        """Yield all chosen letters of applied epochs, by epoch, in parts."""
        self._refresh()
        opened = self._server.open_point_in_time(self._index)
        try:
            after = None
            while True:
                page = self._server.search(
                    None,
                    self._query(chosen, _counting(kept)),
                    _PAGE,
                    sort=[{"epoch": "asc"}, {"_shard_doc": "asc"}],
                    after=after,
                    point_in_time=opened,
                )
                opened, hits = page.point_in_time, page.hits
                if not hits:
                    return
                after = hits[-1]["sort"]
                for epoch, part in groupby(hits, lambda hit: int(hit["_source"]["epoch"])):
                    yield epoch, list(part)
        finally:
            # it ends by itself; and a second try whose first one was carried out does not find it
            with suppress(*CLIENT_ERRORS):
                self._server.close_point_in_time(opened)

    def _pending(self, kept: MarkerDocument | None) -> dict[str, Any]:
        """Return the condition of letters of an epoch that is neither applied nor closed by an operator."""
        newest = max(kept.epoch if kept else -1, self.applied.epoch if self.applied else -1)
        return {"range": {"epoch": {"gt": newest}}}

    def _query(self, chosen: Chosen, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the query for chosen letters to which one of the conditions ``states`` applies."""
        conditions: list[dict[str, Any]] = [{"term": {"key": identity_key(self._identity)}}]
        if chosen.ids:
            conditions.append({"ids": {"values": list(chosen.ids)}})
        if chosen.epoch is not None:
            conditions.append({"term": {"epoch": chosen.epoch}})
        return {"bool": {"filter": conditions, "should": list(states), "minimum_should_match": 1}}

    def _delete(self, epoch: int, hits: Sequence[Hit]) -> list[Refusal]:
        """Delete letters of an epoch; return those that stay, because another program has changed them."""
        return delete(self._server, hits, self._identity, epoch, self._config.timeout)

    def _refresh(self) -> None:
        refresh_all(self._server, self._index)

    @property
    def _patiently(self) -> RetryPolicy:
        return retrying(is_passing, seconds=self._config.timeout, clock=self._clock)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            with explained(PrepareFailed, f"{doing} the dead letters in {self._index!r}"):
                yield
        except GaveUp as error:
            raise OutcomeUnknown(
                f"{doing} the dead letters in {self._index!r} was broken off: {error}",
                hint="type it again: what is done is not done twice",
            ) from error


def _counting(kept: MarkerDocument | None) -> list[dict[str, Any]]:
    """Return the conditions of letters that count: of runs that the marker names, up to the epoch that it names."""
    runs = {} if kept is None else kept.letters
    return [
        {"bool": {"filter": [{"term": {"run": run}}, {"range": {"epoch": {"lte": epoch}}}]}}
        for run, epoch in runs.items()
    ] or [{"match_none": {}}]


def _ends(names: Iterable[str]) -> pa.Array:
    """Return the ends of the action lines of documents with these ids."""
    return pa.array([json.dumps({"_id": name})[1:] for name in names], pa.string())


def _names(rows: pa.RecordBatch, ids: pa.Array) -> Iterator[tuple[str, str]]:
    """Yield ``_id`` and index of rows, "" if they name none."""
    indices = rows["index"].to_pylist() if "index" in rows.schema.names else repeat("", len(rows))
    for end, index in zip(ids.to_pylist(), indices, strict=True):
        yield json.loads(f"{{{end}")["_id"], index


def _newest(rows: pa.RecordBatch, ids: pa.Array, fit: Sequence[int]) -> list[int]:
    """Return the places of those rows of ``fit`` that are the newest of their document, as in an epoch."""
    chosen = pa.array(fit, pa.int64())
    rows, ids = rows.take(chosen), ids.take(chosen)
    table = pa.Table.from_batches([rows]).append_column("end", bulk_body.action_ends(rows, ids))
    newest: list[int] = deduplicate.last(table.append_column("number", chosen), "end")["number"].to_pylist()
    return sorted(newest)


def _letter(hit: Hit, kept: MarkerDocument | None) -> Letter:
    source = hit["_source"]
    row = {name: source[name] for name in ("index", "routing") if name in source}
    row |= {"_id": source["id"], "document": _document(source["source"])}
    at = datetime.fromtimestamp(source["rejected_at"] / 1000, UTC).isoformat(timespec="seconds")
    pending = kept is None or source["epoch"] > kept.epoch
    return Letter(hit["_id"], source["epoch"], source["error"], source["reason"], row, at, pending)


def _document(source: str | None) -> Any:
    """Return a document for people: a number that JSON's readers round is text."""
    if source is None:
        return None
    try:
        return json.loads(source, parse_float=_number, parse_constant=str)
    except ValueError:
        return source


def _number(text: str) -> float | str:
    return float(text) if Decimal(repr(float(text))) == Decimal(text) else text
