"""Overwrite documents that another program has changed with an epoch's rows.

Each write by another program (`_update`, a delete) raises a document's version by one. After two of them the version is
above that of the next epoch, and the server refuses that epoch's row with 409. If the marker still names an earlier
epoch and this driver still has the ledger, the document was changed elsewhere: the row overwrites it with a version one
higher. Documents of another sink have versions with another base. They are left alone and stop the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from epochsink.elasticsearch import applied_epochs, bulk_body
from epochsink.elasticsearch.bulk_request import Poster
from epochsink.elasticsearch.errors import Refusal
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import RowsRejected

_ROUNDS: Final = 8
_DELETED_STEP: Final = 16
"""Factor by which the next round raises the version, because the server does not tell that of a deleted document."""


def stored_versions(server: ElasticsearchServer, index: str, conflicts: Sequence[Refusal]) -> dict[str, int]:
    """Return the versions of stored documents by their ``_id``; ``index`` as in `Poster`. Raises `NotServed`."""
    if not conflicts:
        return {}
    names = [{"_id": each.id, **each.place} if each.place else each.id for each in conflicts]
    return {each.id: each.version for each in server.find(index or None, names)}


class ChangedElsewhere:
    """Writes the refused rows of one epoch.

    ``stop_if_overtaken`` raises if another driver has taken over, or has applied the epoch in the meantime.
    """

    def __init__(
        self,
        server: ElasticsearchServer,
        poster: Poster,
        index: str,
        *,
        base: int,
        version: int,
        stop_if_overtaken: Callable[[], None],
    ) -> None:
        self._server = server
        self._poster = poster
        self._index = index
        self._base = base
        self._version = version
        self._stop_if_overtaken = stop_if_overtaken

    def overwrite(self, refused: Sequence[Refusal], *, keyed: bool) -> list[Refusal]:
        """Overwrite stored documents with refused operations; return those that the server refuses for another reason.

        Raises `RowsRejected` if another sink wrote these documents, and what ``stop_if_overtaken`` raises.
        """
        others: list[Refusal] = []
        conflicts = list(refused)
        for attempt in range(_ROUNDS):
            stored = self._stored(conflicts)
            # After reading the versions, not before: otherwise a later epoch's documents would look changed elsewhere.
            self._stop_if_overtaken()
            self._refuse_other_sinks(conflicts, stored)
            if not keyed:
                # Only this epoch writes these ids: the document was stored and then changed. The change is kept.
                conflicts = [each for each in conflicts if each.id not in stored]
            # Never use a version twice: a late request of a slow driver must be refused.
            above = self._version + _DELETED_STEP**attempt
            again = [(each, stored.get(each.id, above - 1) + 1) for each in conflicts]
            answers = self._poster.post(bulk_body.newer(again))
            others += [each for each in answers if not each.conflict]
            conflicts = [each for each in answers if each.conflict]
            if not conflicts:
                return others
        raise self._written_by_others([each.id for each in conflicts], self._stored(conflicts))

    def _stored(self, conflicts: Sequence[Refusal]) -> dict[str, int]:
        return stored_versions(self._server, self._index, conflicts)

    def _refuse_other_sinks(self, conflicts: Sequence[Refusal], stored: dict[str, int]) -> None:
        end = self._base + applied_epochs.EPOCHS
        if foreign := [each.id for each in conflicts if stored.get(each.id, 0) >= end]:
            raise self._written_by_others(foreign, stored)

    def _written_by_others(self, foreign: Sequence[str], stored: dict[str, int]) -> RowsRejected:
        shown = ", ".join(f"{each!r} (version {stored.get(each) or 'of a deletion'})" for each in foreign[:5])
        return RowsRejected(
            f"{len(foreign)} document(s) of {self._poster.shown} have newer versions than this sink's "
            f"{self._version}, which this sink did not write",
            hint="let only one sink write these documents: stop the other writer, then start this query with a new "
            "checkpoint, whose versions are higher; the epoch stays pending and nothing is lost",
            values=shown,
            ids=list(foreign[:100]),
        )
