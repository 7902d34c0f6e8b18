"""Find rows that no request can hold: their ``_id`` or routing is missing or too long, or JSON cannot hold a value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers

LONGEST_ID: Final = 512
PATH_BYTES: Final = 20_000
"""Largest total length of a value's keys in bytes: they share a term of 32,766 bytes with an indexed text."""
INVALID_KEY: Final = "invalid_key"
NOT_UTF8, WRONG_KEY, NOT_JSON = "text", "map", "variant"
"""What is wrong with a value that no document can hold, as the sentence before the document begins."""
_ERRORS: Final = {NOT_UTF8: "invalid_text", WRONG_KEY: "invalid_map", NOT_JSON: "invalid_variant"}
"""Likewise, as the error of a dead letter."""
_REASONS: Final = {
    NOT_UTF8: "a row holds text that is not valid UTF-8",
    WRONG_KEY: "a row holds a map with a key that no index accepts: duplicate, with a NUL, or longer "
    f"than {PATH_BYTES} bytes together with the keys around it",
    NOT_JSON: "a row holds a VARIANT with NaN or an infinity, which Spark does not write as JSON",
}
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
        document_id = json.loads("{" + (ids[place].as_py() or "}")).get("_id")
        if not document_id or len(document_id.encode()) > LONGEST_ID:
            missing = "a row has no _id: its key is NULL, or not valid UTF-8"
            what = missing if document_id is None else f"a row has an _id of {len(document_id.encode())} bytes"
            yield Unfit(
                place,
                f"{what}; it must have 1 to {LONGEST_ID} bytes",
                "" if document_id is None else f"_id {document_id!r}",
            )


def unfit_routings(routings: pa.Array) -> Iterator[Unfit]:
    """Yield rows whose routing is NULL, empty or too long."""
    lengths = pc.binary_length(routings)
    shortest, longest = (arrow_buffers.number(len('{"routing":""}') + more, "int32") for more in (1, LONGEST_ID))
    for place in _places(pc.or_(pc.less(lengths, shortest), pc.greater(lengths, longest))):
        text = routings[place].as_py()
        routing = json.loads(text).get("routing")
        what = "is empty, NULL or not valid UTF-8" if not routing else f"has {len(text)} bytes as JSON"
        yield Unfit(place, f"the routing of a row {what}; it must have 1 to {LONGEST_ID} bytes", f"routing {routing!r}")


def unfit_values(sources: pa.Array) -> Iterator[Unfit]:
    """Yield rows whose source is not a document, but begins with a sentence about a value that JSON cannot hold."""
    for place in _places(pc.invert(pc.starts_with(sources, "{"))):
        kind, _, shown = sources[place].as_py().partition(_AFTER_REASON)[0].partition(" ")
        yield Unfit(place, _REASONS[kind], shown, _ERRORS[kind])


def sentence_of(what: str, shown: str) -> str:
    """Return the SQL of the sentence before a document: what is wrong, and the value. Both are SQL."""
    return f"concat({what}, coalesce({shown}, ''), char({ord(_AFTER_REASON)}))"


def document_of(source: str | None) -> str | None:
    """Return the document of a source, without sentences before it; None for a delete."""
    # JSON has no line break in it
    return source if source is None else source.rpartition(_AFTER_REASON)[2]


def _lengths(ids: pa.Array) -> pa.Array:
    return pc.fill_null(pc.binary_length(ids), arrow_buffers.number(0, "int32"))


def _places(mask: pa.Array) -> list[int]:
    return list(map(int, np.flatnonzero(mask.to_numpy(zero_copy_only=False)))) if mask.true_count else []
