"""Find rows that no request can hold: their ``_id`` or routing is missing or too long."""

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
_ENVELOPE: Final = len('"_id":""}')


@dataclass(frozen=True, slots=True)
class Unfit:
    """A row's place in its column, what is wrong with it, and its value, "" if it has none."""

    place: int
    reason: str
    value: str


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


def _lengths(ids: pa.Array) -> pa.Array:
    return pc.fill_null(pc.binary_length(ids), arrow_buffers.number(0, "int32"))


def _places(mask: pa.Array) -> list[int]:
    return list(map(int, np.flatnonzero(mask.to_numpy(zero_copy_only=False)))) if mask.true_count else []
