"""Show an operator the dead letters of an index, and retry or drop them.

A retry writes a document as its epoch would have: with the same ``_id`` and the same version. Then it deletes the
letter. Killed in between, or done twice at once, it stores the same document again; a document that a later epoch has
written has a higher version and stays. So does one that another program has changed, which raises its version. If the
version is above those of all epochs, the letter stays, too: its row may be the newer one. In a data stream, which has
no versions, a retry first looks for the documents that are there, in every backing index.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from epochsink.elasticsearch import applied_epochs, bulk_body, target_index
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.changed_elsewhere import stored_versions
from epochsink.elasticsearch.config import MARKERS, is_index_name
from epochsink.elasticsearch.connection import refresh_all
from epochsink.elasticsearch.data_stream import Copies, Created, Stream
from epochsink.elasticsearch.dead_letter import Hit, delete
from epochsink.elasticsearch.errors import CLIENT_ERRORS, GaveUp, Refusal, UnfitIndex, explained, is_passing
from epochsink.elasticsearch.unfit import INVALID_MAP
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import identity_key
from epochsink.retry import retrying
from epochsink.sink import Letter, Letters, Retried

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import elasticsearch
    from elastic_transport import ObjectApiResponse
    from tenacity import Retrying

    from epochsink.elasticsearch.applied_epochs import Marker
    from epochsink.elasticsearch.config import ElasticsearchConfig
    from epochsink.sink import Chosen, Identity

    Write = Callable[[Sequence[Refusal], int], tuple[list[Refusal], Collection[str]]]
    """Writes documents of an epoch. Returns those that are refused, and the ids of those that are superseded."""

_PAGE: Final = 500
_WINDOW: Final = 10_000
"""The most hits that one search may return."""
_ALIVE: Final = "5m"
_TURNS: Final = 3
_CHANGED: Final = (
    "the version of the stored document is above those of all applied epochs: another program has changed or deleted "
    "it, or an epoch is being applied; compare both, write the row by hand if it is the newer one, and drop the letter"
)


class ElasticsearchLetters(Letters):
    """The letters of one sink in the dead-letter index ``index``."""

    def __init__(
        self, client: elasticsearch.Elasticsearch, config: ElasticsearchConfig, identity: Identity, index: str
    ) -> None:
        self._client = client
        self._config = config
        self._identity = identity
        self._index = index

    def read(self, chosen: Chosen, limit: int) -> list[Letter]:
        """Return the newest letters, also those of an epoch that is not applied yet, once each."""
        with self._explained("reading"):
            kept = applied_epochs.read(self._client, self._identity)
            self._refresh()
            query = self._query(chosen, [*_applied(kept), *_pending(kept)])
            newest = [{"epoch": "desc"}, {"rejected_at": "desc"}]
            found = self._search(index=self._index, query=query, size=min(limit, _WINDOW), sort=newest)
        letters: dict[str, Letter] = {}
        for hit in found["hits"]["hits"]:
            # each run at a pending epoch has written letters, whose ids end in the run
            name = hit["_id"].removesuffix(hit["_source"]["run"])
            letters.setdefault(name, _letter(hit, kept))
        return list(letters.values())

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters of applied epochs."""
        with self._explained("counting"):
            self._refresh()
            kept = applied_epochs.read(self._client, self._identity)
            query = self._query(chosen, _applied(kept))
            found = self._search(index=self._index, query=query, size=0, track_total_hits=True)
            return int(found["hits"]["total"]["value"])

    def caution(self) -> str:
        """Say which stored documents a retry replaces."""
        if not self._config.key:
            return ""
        said = (
            "a document stays if a later epoch has written its key, or another program has changed it since; its "
            "letter is deleted, unless the version of the document shows that no epoch can have written it"
        )
        if self._config.delete_when:
            # the server keeps the versions of deleted documents in memory
            said += (
                f"; one that a later epoch deleted is added again if that was more than {self._config.gc_deletes} ago "
                "(gc_deletes=), or if the primary shard has restarted or moved since"
            )
        return said

    def drop(self, chosen: Chosen) -> int:
        """Delete letters of applied epochs."""
        dropped = 0
        with self._explained("deleting"):
            for epoch, hits in self._applied(chosen, applied_epochs.read(self._client, self._identity)):
                dropped += len(hits) - len(self._delete(epoch, hits))
        return dropped

    def retry(self, chosen: Chosen) -> Retried:
        """Write the documents of letters of applied epochs, then delete the letters."""
        done = Retried()
        with self._explained("retrying"):
            kept = applied_epochs.read(self._client, self._identity)
            if kept is None:
                return done
            write = self._writer(kept)
            for epoch, hits in self._applied(chosen, kept):
                done += self._retry(write, epoch, hits)
            if self._config.refresh and self._config.index and done.written:
                refresh_all(self._client, self._config.index)
        return done

    def _writer(self, kept: Marker) -> Write:
        """Return what writes documents to the index, which must be the one that the marker names, or accepted.

        Raises `WentBack`.
        """
        config, found = self._config, self._found(kept)
        if isinstance(found, Stream):
            return lambda operations, _: (self._append(kept, operations), ())  # it has no versions
        # Even if ``found`` has no pipeline: it may get one during the retry, and letters may be for other indices than
        # those of the newest epoch.
        poster = Poster(self._client, found.posted_to, config.timeout, pipeline=config.pipeline, stored_in=found.index)

        def write(operations: Sequence[Refusal], epoch: int) -> tuple[list[Refusal], Collection[str]]:
            version = self._identity.origin["base"] + epoch
            request = bulk_body.newer([(each, version) for each in operations], version_type="external_gte")
            refused = poster.post(request)
            return refused, self._superseded([each for each in refused if each.conflict], found.posted_to)

        return write

    def _append(self, kept: Marker, operations: Sequence[Refusal]) -> list[Refusal]:
        """Append the documents that no backing index has, and again if the stream rolls over; return refused ones."""
        config = self._config
        created = Created(config.index)
        poster = Poster(self._client, config.index, config.timeout, pipeline=config.pipeline, created=created)
        stream = self._stream(kept)
        for _ in range(_TURNS):
            stored = self._patiently(Copies(self._client, stream).stored, [each.id for each in operations])
            refused = poster.post(bulk_body.creates([each for each in operations if each.id not in stored]))
            before, stream = stream, self._stream(kept)
            created.require_within(stream)
            if stream.incarnation == before.incarnation:
                # a document that another retry has appended is the one to write
                return [each for each in refused if not each.conflict]
        raise OutcomeUnknown(
            f"the data stream {config.index!r} rolled over in each of {_TURNS} attempts to append to it",
            hint="type it again: what is done is not done twice",
        )

    def _stream(self, kept: Marker) -> Stream:
        found = self._found(kept)
        if not isinstance(found, Stream):
            raise TypeError(f"{found.index!r} was a data stream, and the marker names it")
        return found

    def _found(self, kept: Marker) -> target_index.Target | target_index.Targets | Stream:
        """Return what the marker names; of a data stream all backing indices: a retry may have appended to any.

        If an operator has accepted another index since, return that one.
        """
        trusted = applied_epochs.trusted(kept, self.applied)
        if self._config.index:
            return self._patiently(target_index.require_same, self._client, self._config, trusted)
        names: Iterable[str] = () if trusted is None else trusted.indices
        return self._patiently(target_index.require_each, self._client, self._config, trusted, names)

    def _retry(self, write: Write, epoch: int, hits: Sequence[Hit]) -> Retried:
        reasons: dict[str, str] = {}
        operations: dict[tuple[str, str], tuple[str, Refusal]] = {}
        existing = {} if self._config.index else self._existing({hit["_source"]["index"] for hit in hits})
        for hit in hits:
            refusal, wrong = self._operation(hit["_source"], existing)
            if wrong:
                reasons[hit["_id"]] = wrong
            else:
                operations[refusal.id, refusal.place.get("_index", "")] = hit["_id"], refusal
        superseded: set[str] = set()
        if operations:
            refusals, newer = write([refusal for _, refusal in operations.values()], epoch)
            for refused in refusals:
                name, _ = operations[refused.id, refused.place.get("_index", "")]
                if refused.id in newer:
                    superseded.add(name)
                else:
                    reasons[name] = _CHANGED if refused.conflict else refused.reason
        reach("elasticsearch.letters.written")
        for stays in self._delete(epoch, [hit for hit in hits if hit["_id"] not in reasons]):
            reasons[stays.id] = f"its row is written, but the letter cannot be deleted: {stays.reason}"
        superseded -= reasons.keys()
        written = len(hits) - len(reasons) - len(superseded)
        return Retried(written, len(superseded), len(reasons), next(iter(reasons.values()), ""))

    def _superseded(self, conflicts: Sequence[Refusal], index: str) -> Collection[str]:
        """Return the ids whose documents a later epoch may have written or deleted.

        Each change by another program raises a version by one. Up to the version of the newest epoch, a document that
        such a program has changed looks like one that an epoch has written.
        """
        if not conflicts or not self._config.key:
            # Without a key only its own epoch writes a document: it is there, and was changed afterwards.
            return {each.id for each in conflicts}
        stored = self._patiently(stored_versions, self._client, index, conflicts)
        # After reading the versions: otherwise an epoch of the running query would look like another program.
        kept = self._patiently(applied_epochs.read, self._client, self._identity)
        newest = self._identity.origin["base"] + (-1 if kept is None else kept.epoch)
        deletes = self._config.delete_when is not None
        return {each.id for each in conflicts if (stored[each.id] <= newest if each.id in stored else deletes)}

    def _operation(self, letter: Mapping[str, Any], existing: Mapping[str, str]) -> tuple[Refusal, str]:
        """Return the operation that was refused, and why it cannot be sent again, if so.

        ``existing`` is what `_existing` returns.
        """
        place = {name: letter[name] for name in ("routing",) if letter.get(name)}
        if not self._config.index:
            place["_index"] = letter["index"]
        refusal = Refusal(letter["id"] or "", letter["source"], letter["status"], letter["error"], "", place)
        if not refusal.id or letter["error"] == INVALID_MAP:
            return refusal, letter["reason"]
        if self._config.index and letter["index"] != self._config.index:
            return (
                refusal,
                f"it was for the index {letter['index']!r}, and the sink writes to {self._config.index!r} now",
            )
        if not self._config.index:
            # without this, the server would create it, without the mapping of the sink
            return refusal, existing.get(letter["index"], f"there is no index {letter['index']!r} for documents")
        return refusal, ""

    def _existing(self, names: Iterable[str]) -> dict[str, str]:
        """Return the existing indices for documents, and why letters for one of them cannot be written, "" if they can.

        Raises `UnfitIndex` if an index does not keep documents as promised.
        """
        found: dict[str, str] = {}
        for name in names:
            if not is_index_name(name) or name in (self._index, MARKERS):
                continue
            try:
                each = target_index.find_each(self._client, self._config, [name]).get(name)
            except UnfitIndex as error:
                # an alias by now
                found[name] = error.message
                continue
            if each is not None:
                # `_found` has checked the indices of the newest epoch only.
                for unfit in target_index.unfit_settings(each, self._config):
                    raise unfit
                found[name] = ""
        return found

    def _applied(self, chosen: Chosen, kept: Marker | None) -> Iterator[tuple[int, list[Hit]]]:
        """Yield all chosen letters of applied epochs, by epoch, in parts."""
        self._refresh()
        opened = self._client.open_point_in_time(index=self._index, keep_alive=_ALIVE)["id"]
        try:
            after = None
            while True:
                found = self._search(
                    query=self._query(chosen, _applied(kept)),
                    size=_PAGE,
                    pit={"id": opened, "keep_alive": _ALIVE},
                    sort=[{"epoch": "asc"}, {"_shard_doc": "asc"}],
                    search_after=after,
                )
                opened = found["pit_id"]
                hits = found["hits"]["hits"]
                if not hits:
                    return
                after = hits[-1]["sort"]
                for epoch, part in groupby(hits, lambda hit: int(hit["_source"]["epoch"])):
                    yield epoch, list(part)
        finally:
            # it ends by itself; and a second try whose first one was carried out does not find it
            with suppress(*CLIENT_ERRORS):
                self._client.close_point_in_time(id=opened)

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
        return delete(self._client, hits, self._identity, epoch, self._config.timeout)

    def _search(self, **wanted: Any) -> ObjectApiResponse[Any]:
        # Without this, letters in a shard that is not available would look as if they were not there.
        return self._client.search(**wanted, allow_partial_search_results=False)

    def _refresh(self) -> None:
        refresh_all(self._client, self._index)

    @property
    def _patiently(self) -> Retrying:
        return retrying(is_passing, seconds=self._config.timeout)

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


def _applied(kept: Marker | None) -> list[dict[str, Any]]:
    """Return the conditions of letters that count: of the marker's run, or of earlier epochs."""
    if kept is None:
        return [{"match_none": {}}]
    newest = {"bool": {"filter": [{"term": {"epoch": kept.epoch}}, {"term": {"run": kept.run}}]}}
    return [{"range": {"epoch": {"lt": kept.epoch}}}, newest]


def _pending(kept: Marker | None) -> list[dict[str, Any]]:
    """Return the condition of letters of an epoch that is not applied."""
    return [{"range": {"epoch": {"gt": -1 if kept is None else kept.epoch}}}]


def _letter(hit: Hit, kept: Marker | None) -> Letter:
    told = hit["_source"]
    row = {name: told[name] for name in ("index", "routing") if name in told}
    row |= {"_id": told["id"], "document": None if told["source"] is None else json.loads(told["source"])}
    at = datetime.fromtimestamp(told["rejected_at"] / 1000, UTC).isoformat(timespec="seconds")
    pending = kept is None or told["epoch"] > kept.epoch
    return Letter(hit["_id"], told["epoch"], told["error"], told["reason"], row, at, pending)
