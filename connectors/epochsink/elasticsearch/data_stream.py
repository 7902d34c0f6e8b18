"""Append rows without a key to a data stream, each once, also across rollovers.

The server appends to the newest backing index, and an ``_id`` is unique within one backing index only. So a document
that is sent again after a rollover would be stored twice. If the stream has rolled over since the vote, a run therefore
first reads which documents exist, in every backing index since then, and sends the others. If it rolls over during a
run, the epoch is applied again in this way, and second copies are deleted. The ``_id`` names the attempt, so a stored
document with it is the one to write.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

import numpy as np

from epochsink.elasticsearch.connection import refresh
from epochsink.elasticsearch.errors import CONFLICT, NotServed, UnfitIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import elasticsearch
    import numpy.typing as npt

    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.elasticsearch.config import ElasticsearchConfig

TIMESTAMP: Final = "@timestamp"
_AT_ONCE: Final = 1000
_ROUNDS: Final = 5
_UNFIT_MODES: Final = {
    "index.mode": ("time_series", "it is a time series stream, which makes every _id itself"),
    "index.mapping.synthetic_id": ("true", "its _id is made from other fields"),
    "index.logsdb.route_on_sort_fields": ("true", "it makes every _id itself"),
}
"""Settings of a backing index with which documents cannot be found by a given ``_id``, and why."""


class SeveralIndices(ABC):
    """Indices that are used like one `Target`, whose uuid and history are those of each."""

    __slots__ = ()
    uuid: ClassVar[str] = ""
    history: ClassVar[str] = ""

    @property
    @abstractmethod
    def indices(self) -> Mapping[str, tuple[str, str]]:
        """The uuid and history of each index."""

    @property
    def incarnation(self) -> Mapping[str, tuple[str, str]]:
        """Equal if there are the same indices, each the same as before: a data stream has not rolled over either."""
        return self.indices


@dataclass(frozen=True, slots=True)
class Stream(SeveralIndices):
    """An existing data stream.

    ``backing`` has the flat settings of its backing indices, oldest first; `written` is the last one. `since` leaves
    out those that cannot hold documents of an epoch. ``mapping`` is that of `written`, ``beside`` as in `Target`.
    """

    index: str
    backing: Mapping[str, Mapping[str, str]]
    mapping: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, str]]

    @property
    def written(self) -> str:
        """The backing index to which the server appends."""
        return list(self.backing)[-1]

    @property
    def posted_to(self) -> str:
        """The stream: the server takes no appends to a backing index."""
        return self.index

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of `written`."""
        return self.backing[self.written]

    @property
    def indices(self) -> Mapping[str, tuple[str, str]]:
        """The uuid and history of each backing index."""
        return {
            name: (settings["index.uuid"], settings.get("index.history.uuid", ""))
            for name, settings in self.backing.items()
        }

    @property
    def refreshes_itself(self) -> bool:
        """False: the documents of an epoch may be in several backing indices, which only `refresh` shows together."""
        return False

    def stored_in(self, pipeline: str | None) -> str | None:  # noqa: ARG002 - as `Target`
        """Return None: `Created` looks at every answer anyway."""
        return None

    def refresh(self, client: elasticsearch.Elasticsearch) -> None:
        """Make all documents searchable. Raises `NotServed`."""
        for name, settings in self.backing.items():
            refresh(client, name, int(settings.get("index.number_of_shards", 1)))

    def since(self, first: Mapping[str, object]) -> Stream:
        """Return the stream without the backing indices that are older than ``first``, if it still exists."""
        names = list(self.backing)
        kept = next((names[place:] for place, name in enumerate(names) if name in first), names)
        return replace(self, backing={name: self.backing[name] for name in kept})


def found(
    client: elasticsearch.Elasticsearch,
    name: str,
    described: Mapping[str, Any],
    beside: Mapping[str, Mapping[str, str]],
) -> Stream:
    """Return the data stream whose backing indices were ``described``. Raises `NotServed` if it rolls over just now."""
    # not by indices.resolve_index(): since 9.5 the client sends POST, which older servers of 9 do not take
    answer = client.perform_request("GET", f"/_resolve/index/{quote(name)}", headers={"accept": "application/json"})
    (stream,) = answer.body["data_streams"]
    names = stream["backing_indices"]
    if set(names) != set(described):
        raise NotServed(f"the data stream {name!r} rolled over while it was looked at")
    backing = {each: described[each]["settings"] for each in names}
    return Stream(name, backing, described[names[-1]].get("mappings", {}), beside)


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

    def require_within(self, stream: Stream) -> None:
        """Raise `UnfitIndex` if documents are stored in other indices than the stream's."""
        if elsewhere := sorted(self._reached - stream.backing.keys()):
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

    def __init__(self, client: elasticsearch.Elasticsearch, stream: Stream) -> None:
        self._client = client
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
            for index in self._stream.backing:
                documents = self._documents(index, ids)
                second += [(index, each) for each in documents if each["_id"] in stored]
                stored |= {each["_id"] for each in documents}
            if not second:
                return stored
            for index, each in second:
                place = {"if_seq_no": each["_seq_no"], "if_primary_term": each["_primary_term"]}
                self._client.options(ignore_status=(404, 409)).delete(index=index, id=each["_id"], **place)
        raise NotServed(f"data stream {self._stream.index!r}: second copies of documents could not be deleted")

    def _documents(self, index: str, ids: Sequence[str]) -> list[Any]:
        # A read by _id sees what was not refreshed yet.
        answers = self._client.mget(index=index, ids=list(ids), source=False)["docs"]
        if failed := [each["error"] for each in answers if "error" in each]:
            # The document is not absent: its shard is not available.
            raise NotServed(f"index {index!r}: {len(failed)} document(s) could not be read: {failed[0]['reason']}")
        return [each for each in answers if each.get("found")]
