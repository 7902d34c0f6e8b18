"""Append rows without a key to a data stream, each once, also across rollovers.

The server appends to the newest backing index, and an ``_id`` is unique within one backing index only. So a document
that is sent again after a rollover would be stored twice. If the stream has rolled over since the vote, a run therefore
first reads which documents exist, in every backing index since then, and sends the others. If it rolls over during a
run, the epoch is applied again in this way, and second copies are deleted. The ``_id`` names the attempt, so a stored
document with it is the one to write.
"""
# ruff: noqa: ARG002 - `ElasticsearchTarget` describes the methods of `DataStreamTarget` and their arguments

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from epochsink.elasticsearch.applied_epochs import MarkerDocument
from epochsink.elasticsearch.bulk_body import Request
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import CONFLICT, NotServed, UnfitIndex
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.elasticsearch.target import ElasticsearchTarget

TIMESTAMP: Final = "@timestamp"
_AT_ONCE: Final = 1000
_ROUNDS: Final = 5
_UNFIT_MODES: Final = {
    "index.mode": ("time_series", "it is a time series stream, which makes every _id itself"),
    "index.mapping.synthetic_id": ("true", "its _id is made from other fields"),
    "index.logsdb.route_on_sort_fields": ("true", "it makes every _id itself"),
}
"""Settings of a backing index with which documents cannot be found by a given ``_id``, and why."""


class DataStreamTarget(ElasticsearchTarget):
    """An existing data stream. ``settings`` has its backing indices, oldest first."""

    __slots__ = ()

    @property
    def newest(self) -> str:
        """The backing index to which the server appends."""
        return list(self.settings)[-1]

    @property
    def stream(self) -> Mapping[str, tuple[str, str]]:
        return {self.newest: self.incarnations[self.newest]}

    @property
    def written(self) -> Mapping[str, Mapping[str, str]]:
        return {self.newest: self.settings[self.newest]}

    def index_behind(self, name: str) -> str:
        # The server takes no appends to a backing index: requests name the stream.
        return self.newest

    @property
    def refreshes_itself(self) -> bool:
        # The documents of an epoch may be in several backing indices, which only `refresh` shows together.
        return False

    def stored_in(self, pipeline: str | None) -> str | None:
        # `Created` looks at every answer anyway.
        return None

    def unfit_columns(self, columns: Collection[str]) -> list[str]:
        if TIMESTAMP in columns:
            return []
        needed = f"every document of the data stream {self.index!r} needs the field {TIMESTAMP!r}, which the rows lack"
        return [f"{needed}: name it in select=, e.g. select=['*', 'created_at AS `{TIMESTAMP}`']"]

    def require_unchanged(self, kept: MarkerDocument | None) -> None:
        if kept is not None and kept.index_uuid:
            reason = "it was an index then, and is a data stream now"
            raise self.not_the_one(kept, f"formerly uuid {kept.index_uuid}", reason)
        super().require_unchanged(kept)

    def since(self, first: Mapping[str, object] | None) -> DataStreamTarget:
        # Older backing indices cannot hold documents of an epoch that was voted on later.
        names = list(self.settings)
        younger = next((names[place:] for place, name in enumerate(names) if name in (first or ())), names)
        return replace(self, settings={name: self.settings[name] for name in younger})


def resolve(
    server: ElasticsearchServer,
    name: str,
    described: Mapping[str, Any],
    beside: Mapping[str, Mapping[str, str]],
) -> DataStreamTarget:
    """Return the data stream whose backing indices were ``described``. Raises `NotServed` if it rolls over just now."""
    names = server.backing_indices(name)
    if set(names) != set(described):
        raise NotServed(f"the data stream {name!r} rolled over while it was looked at")
    return DataStreamTarget(name, {each: described[each]["settings"] for each in names}, beside)


def unfit(name: str, described: Mapping[str, Any], config: ElasticsearchConfig | None) -> UnfitIndex | None:
    """Return why rows cannot be appended to the data stream of the backing indices that ``name`` stands for.

    ``config`` are the arguments to compare, None for those of a recorded epoch, which were compared before.
    """
    streams = sorted({str(each.get("data_stream")) for each in described.values()})
    if streams != [name]:
        return UnfitIndex(f"{name!r} is not a data stream, but belongs to {', '.join(streams)}", "name the data stream")
    if config is not None and config.key:
        reason = "which takes no second row of a key: it accepts neither versions nor deletes"
        return UnfitIndex(f"{name!r} is a data stream, {reason}", "leave key= out to append rows, or name an index")
    if config is not None and (config.routing is not None or config.validate):
        argument = "validate=True" if config.validate else f"routing={config.routing!r}"
        return UnfitIndex(f"{name!r} is a data stream, which cannot be used with {argument}", "leave that argument out")
    for index, each in described.items():
        for setting, (value, reason) in _UNFIT_MODES.items():
            if str(each["settings"].get(setting, "")).lower() == value:
                shown = f"{setting}={value} of its backing index {index!r}"
                hint = "name a data stream without it, or an index"
                return UnfitIndex(
                    f"{name!r} cannot be written exactly once: {reason} ({shown}), so a replay could not find what is "
                    "there",
                    hint,
                )
    return None


class Created:
    """Looks at the answer to each create: the document must be in the stream. Used by several threads.

    So must a document that exists already (409): a pipeline may have sent it elsewhere in an earlier request, whose
    answer was lost, or in an earlier run.
    """

    fields: Final = ",items.*._index,items.*._id,items.*.result,items.*.failure_store"
    """The fields of the answer to request for each operation, after those of every answer."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._reached: set[str] = set()

    def look(self, request: Request, items: Sequence[Mapping[str, Any]]) -> None:
        """Remember the indices of the documents of a request that are stored.

        Raises `UnfitIndex` if they were dropped, or are stored in the failure store or under another ``_id``.
        """
        answers = [item["create"] for item in items]
        if _all_created(request, answers):
            self._reached |= {str(answer.get("_index")) for answer in answers}
            return
        for position, answer in enumerate(answers):
            exists = answer["status"] == CONFLICT
            if "error" in answer and not exists:
                continue
            if answer.get("failure_store") == "used":
                raise UnfitIndex(
                    f"the data stream {self._stream!r} has put a document that it refuses into its failure store",
                    f'turn that off (PUT /_data_stream/{self._stream}/_options {{"failure_store": {{"enabled": false}}'
                    "}), delete what this query has written there, and start the query again",
                )
            if not exists and answer.get("result") != "created":
                raise self._moved(str(answer.get("result")))
            # A second row with the same changed _id is not stored, and a retry after a rollover finds none of them.
            sent = json.loads(request.operation(position).partition(b"\n")[0])["create"]["_id"]
            if answer.get("_id") != sent:
                raise self._moved("stored under another _id")
            self._reached.add(str(answer.get("_index")))

    def require_within(self, indices: Mapping[str, object]) -> None:
        """Raise `UnfitIndex` if documents are stored in other indices than the stream's."""
        if elsewhere := sorted(self._reached - indices.keys()):
            raise self._moved(f"stored in {', '.join(elsewhere)}")

    def _moved(self, what: str) -> UnfitIndex:
        return UnfitIndex(
            f"an ingest pipeline of the data stream {self._stream!r} has dropped documents, or sent them elsewhere "
            f"({what})",
            "correct the pipeline or remove it, delete what it has written elsewhere or under another _id, and start "
            "the query (or the retry of dead letters) again: it writes the documents that are missing",
        )


def _all_created(request: Request, answers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each document is stored as it was sent, as usual: lists are compared faster than documents."""
    kinds = {(answer.get("result"), answer.get("failure_store") == "used") for answer in answers}
    sent = request.own_fields()
    wanted = None if sent is None else [fields["_id"] for fields in sent]
    return kinds == {("created", False)} and [answer.get("_id") for answer in answers] == wanted


class Copies:
    """Finds stored documents by their ``_id`` in all backing indices of a stream."""

    def __init__(self, server: ElasticsearchServer, stream: ElasticsearchTarget) -> None:
        self._server = server
        self._stream = stream

    def missing(self, prefix: str, count: int) -> npt.NDArray[np.bool_]:
        """Return which of ``count`` rows, each with its number after ``prefix``, have no document. As `stored`."""
        absent = np.ones(count, np.bool_)
        for first in range(0, count, _AT_ONCE):
            ids = [f"{prefix}{number}" for number in range(first, min(first + _AT_ONCE, count))]
            stored = self.stored(ids)
            absent[first : first + len(ids)] = [each not in stored for each in ids]
        return absent

    def stored(self, ids: Sequence[str]) -> set[str]:
        """Return which of some ids, at most a thousand, have a document. Delete second copies. Raises `NotServed`."""
        for _ in range(_ROUNDS):
            stored: set[str] = set()
            second = []
            # Oldest first, so that two drivers that do this at once delete the same copy.
            for index in self._stream.indices:
                # A read by _id sees what was not refreshed yet.
                documents = self._server.find(index, ids)
                second += [(index, each) for each in documents if each.id in stored]
                stored |= {each.id for each in documents}
            if not second:
                return stored
            for index, each in second:
                self._server.delete(index, each.id, over=each.place)
        raise NotServed(f"data stream {self._stream.index!r}: second copies of documents could not be deleted")
