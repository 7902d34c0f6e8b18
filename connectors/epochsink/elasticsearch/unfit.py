"""Find rows that no request can hold: their ``_id`` or routing is missing or too long, or a map has a wrong key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.compute as pc

from epochsink import arrow_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

LONGEST_ID: Final = 512
PATH_BYTES: Final = 20_000
"""Largest total length of a value's keys in bytes: they share a term of 32,766 bytes with an indexed text."""
INVALID_KEY: Final = "invalid_key"
INVALID_MAP: Final = "invalid_map"
"""The errors of dead letters of such rows; none of them can be written again as it was."""
_AFTER_REASON: Final = "\n"
_ENVELOPE: Final = len('"_id":""}')


@dataclass(frozen=True, slots=True)
class Unfit:
    """A row's place in its column, what is wrong with it, and its value, "" if it has none."""

    place: int
    reason: str
    value: str
    error: str = INVALID_KEY


def without_id(ids: pa.Array) -> pa.Array:
    """Return which ids are NULL or empty."""
    return pc.less_equal(_lengths(ids), arrow_buffers.number(_ENVELOPE, "int32"))


def unfit_ids(ids: pa.Array) -> Iterator[Unfit]:
    """Yield rows whose id, the end of an action line, is NULL, empty or too long."""
    longest = arrow_buffers.number(_ENVELOPE + LONGEST_ID, "int32")
    for place in _places(pc.or_(without_id(ids), pc.greater(_lengths(ids), longest))):
        found = json.loads("{" + (ids[place].as_py() or "}")).get("_id")
        if not found or len(found.encode()) > LONGEST_ID:
            missing = "a row has no _id: its key is NULL, or not valid UTF-8"
            what = missing if found is None else f"a row has an _id of {len(found.encode())} bytes"
            yield Unfit(
                place, f"{what}; it must have 1 to {LONGEST_ID} bytes", "" if found is None else f"_id {found!r}"
            )


def unfit_routings(routings: pa.Array) -> Iterator[Unfit]:
    """Yield rows whose routing is NULL, empty or too long."""
    lengths = pc.binary_length(routings)
    shortest, longest = (arrow_buffers.number(len('{"routing":""}') + more, "int32") for more in (1, LONGEST_ID))
    for place in _places(pc.or_(pc.less(lengths, shortest), pc.greater(lengths, longest))):
        text = routings[place].as_py()
        found = json.loads(text).get("routing")
        what = "is empty, NULL or not valid UTF-8" if not found else f"has {len(text)} bytes as JSON"
        yield Unfit(place, f"the routing of a row {what}; it must have 1 to {LONGEST_ID} bytes", f"routing {found!r}")


def unfit_maps(sources: pa.Array) -> Iterator[Unfit]:
    """Yield rows whose source is not a document, but begins with a sentence about a map with a wrong key."""
    for place in _places(pc.invert(pc.starts_with(sources, "{"))):
        yield Unfit(
            place,
            "a row holds a map with a key that no index accepts: duplicate, with a NUL, not valid UTF-8, or longer "
            f"than {PATH_BYTES} bytes together with the keys around it",
            sources[place].as_py().partition(_AFTER_REASON)[0],
            INVALID_MAP,
        )


def source_of(reason: str, document: str) -> str:
    """Return the SQL of a source: the document, and the reason before it unless that is NULL. Both are SQL."""
    # the document once: Spark would render it twice if it stood in two branches
    return f"concat(coalesce(concat({reason}, char({ord(_AFTER_REASON)})), ''), {document})"


def document_of(source: str | None) -> str | None:
    """Return the document of a source, without the sentence before it; None for a delete."""
    return source if source is None or source.startswith("{") else source.partition(_AFTER_REASON)[2]


def _lengths(ids: pa.Array) -> pa.Array:
    return pc.fill_null(pc.binary_length(ids), arrow_buffers.number(0, "int32"))


def _places(mask: pa.Array) -> list[int]:
    return list(map(int, np.flatnonzero(mask.to_numpy(zero_copy_only=False)))) if mask.true_count else []
