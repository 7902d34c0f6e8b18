"""Find the markers of all sinks that wrote to a cluster, without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import elasticsearch

from epochsink.elasticsearch.applied_epochs import INDEX
from epochsink.elasticsearch.errors import NOT_FOUND, explained
from epochsink.errors import EpochsinkError
from epochsink.identity import identity_key
from epochsink.sink import Identity, Remnant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARKER: Final = "marker"
_MOST: Final = 1000


class Node:
    """One cluster, for an operator. Raises `EpochsinkError` if it is unreachable or refuses a request."""

    def __init__(self, hosts: Sequence[str], options: Mapping[str, str]) -> None:
        self._client = elasticsearch.Elasticsearch(list(hosts), **options)  # type: ignore[arg-type] # its own names

    def remnants(self) -> list[Remnant]:
        """Return the marker of every sink. A marker blocks nothing: between commits the server holds no rows."""
        with explained(EpochsinkError, "reading the markers"):
            answer = self._client.options(ignore_status=NOT_FOUND).search(
                index=INDEX, query={"exists": {"field": "query_id"}}, size=_MOST
            )
        return [self._remnant(hit["_id"], hit["_source"]) for hit in answer.body.get("hits", {}).get("hits", [])]

    def end(self, remnant: Remnant) -> None:
        """Delete a marker. After that, an older epoch of this query could be applied again."""
        with explained(EpochsinkError, f"deleting {remnant.name}"):
            self._client.options(ignore_status=NOT_FOUND).delete(index=INDEX, id=remnant.name, refresh=True)

    def close(self) -> None:
        """Release the connections."""
        self._client.close()

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
        )
