"""Find the markers of all sinks that wrote to a cluster, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochsink.elasticsearch.applied_epochs import INDEX
from epochsink.elasticsearch.errors import NOT_FOUND, RequestRefused, explained
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import EpochsinkError
from epochsink.sink import Identity, Remnant, identity_key

MARKER: Final = "marker"
_MOST: Final = 1000
_STAYS: Final = "it blocks nothing, and without it an older epoch of its query could be applied again"


class Node:
    """One cluster, for an operator. Raises `EpochsinkError` if it is unreachable or refuses a request."""

    def __init__(self, server: ElasticsearchServer) -> None:
        self._server = server

    def remnants(self) -> list[Remnant]:
        """Return the marker of every sink. A marker blocks nothing: between commits the server holds no rows."""
        with explained(EpochsinkError, "reading the markers"):
            try:
                hits = self._server.search(INDEX, {"exists": {"field": "query_id"}}, _MOST).hits
            except RequestRefused as error:
                if error.status_code != NOT_FOUND:
                    raise
                return []
        return [self._remnant(hit["_id"], hit["_source"]) for hit in hits]

    def end(self, remnant: Remnant) -> None:
        """Refuse: there are only markers."""
        raise EpochsinkError(f"{remnant.name} must stay: {_STAYS}")

    def close(self) -> None:
        """Release the connections."""
        self._server.close()

    @staticmethod
    def _remnant(name: str, kept: Mapping[str, str | int]) -> Remnant:
        sink = str(kept["sink"])
        return Remnant(
            kind=MARKER,
            name=name,
            key=identity_key(Identity(str(kept["query_id"]), sink)),
            label=f"/{sink}",
            generation=0,
            epoch=int(kept["epoch"]),
            since=int(kept.get("applied_at", 0)) / 1000,
            owner=f"query {kept['query_id']}, index {kept.get('index', '?')}",
            stays=_STAYS,
        )
