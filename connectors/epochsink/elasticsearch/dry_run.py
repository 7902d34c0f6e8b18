"""Asking the server whether it would take documents, without writing any.

An operation that demands a sequence number that no document has is parsed against the mapping, goes through
every check of the index, and ends in a version conflict: 409 says that everything else was right. Only
fields that a dynamic mapping adds stay behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.elasticsearch.bulk_body import action_heads, render

if TYPE_CHECKING:
    from epochsink.elasticsearch.bulk_body import Request
    from epochsink.elasticsearch.bulk_request import Poster, Refusal

_HEADS: Final = action_heads(if_seq_no=2**62, if_primary_term=1)


def request(ids: pa.Array, sources: pa.Array) -> Request:
    """Return operations that are checked and never applied."""
    return render(ids, sources, _HEADS)


def refused(poster: Poster, asked: Request) -> list[Refusal]:
    """Return what the server would refuse. Raises as `Poster.post` does."""
    return [refusal for refusal in poster.post(asked) if not refusal.conflict]


def refused_by_index(poster: Poster) -> list[Refusal]:
    """Return why the index would refuse even an empty document. Raises as `Poster.post` does."""
    return refused(poster, request(pa.array(['"_id":"epochsink-probe"}']), pa.array(["{}"])))
