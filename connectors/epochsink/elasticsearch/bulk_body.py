"""Build the bodies of bulk requests from Arrow columns, without Python code for each row."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.elasticsearch.errors import Refusal
from epochsink.elasticsearch.unfit import INVALID_KEY, Unfit, document_of, unfit_ids, unfit_routings, unfit_values
from epochsink.identity import document_id_prefix
from epochsink.sink import identity_key

if TYPE_CHECKING:
    from epochsink.sink import Epoch, Identity, Rows

_TEXT = pa.large_binary()  # 64-bit offsets: a rendered batch of large documents may exceed 2 GiB
_BAD_REQUEST = 400
_NONE = arrow_buffers.text("", _TEXT)


@dataclass(frozen=True, slots=True)
class Request:
    """Operations of one bulk request: operation ``i`` is the bytes between offsets ``i`` and ``i + 1``.

    ``ends`` are the ends of their action lines, if these are the same before them; else None. ``rows`` are the rows as
    the writer was given them, one for each operation; None if they are not needed.
    """

    data: pa.Buffer
    offsets: npt.NDArray[np.int64]
    ends: pa.Array | None = None
    rows: pa.Table | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """The length of `body` in bytes."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def body(self) -> bytes:
        """The bytes to post."""
        return bytes(memoryview(self.data)[self.offsets[0] : self.offsets[-1]])

    def operation(self, position: int) -> bytes:
        """Return the action line of one operation, and the line of its document if it has one."""
        return bytes(memoryview(self.data)[self.offsets[position] : self.offsets[position + 1]])

    def own_fields(self) -> list[dict[str, str]] | None:
        """Return ``_id`` and `place` of each operation, None if not known. Action lines take ten times as long."""
        if self.ends is None:
            return None
        fields: list[dict[str, str]] = json.loads(b"[{" + b",{".join(self.ends.to_pylist()) + b"]")
        return fields

    def row(self, position: int) -> pa.Table | None:
        """Return a copy of the row of one operation: a slice would keep those of the whole request in memory."""
        return None if self.rows is None else self.rows.take(arrow_buffers.numbers(np.array([position])))

    def pick(self, positions: list[int]) -> Request:
        """Return a request of some of the operations."""
        chosen = [self.operation(position) for position in positions]
        offsets = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
        rows = None if self.rows is None else self.rows.take(arrow_buffers.numbers(np.array(positions, np.int64)))
        return Request(pa.py_buffer(b"".join(chosen)), offsets, rows=rows)

    def split(self, size: int) -> tuple[Request, Request]:
        """Return the first operations, of at most ``size`` bytes but at least one, and the others."""
        fitting = int(np.searchsorted(self.offsets, self.offsets[0] + size, side="right")) - 1
        end = max(fitting, 1)
        return self._part(0, end), self._part(end, len(self))

    def halves(self) -> tuple[Request, Request]:
        """Split the operations in two."""
        middle = len(self) // 2
        return self._part(0, middle), self._part(middle, len(self))

    def _part(self, first: int, end: int) -> Request:
        ends, rows = (None if each is None else each.slice(first, end - first) for each in (self.ends, self.rows))
        return Request(self.data, self.offsets[first : end + 1], ends, rows)


def parse(operation: bytes) -> tuple[str, str | None]:
    """Return the ``_id`` and the document (JSON text, None for a delete) of one operation."""
    action, _, document = operation.rstrip(b"\n").partition(b"\n")
    (fields,) = json.loads(action).values()
    return fields["_id"], document.decode() or None


def place(operation: bytes) -> dict[str, str]:
    """Return the fields of an operation, other than its ``_id``, that decide where the document is stored."""
    (fields,) = json.loads(operation.partition(b"\n")[0]).values()
    return {name: fields[name] for name in ("_index", "routing") if name in fields}


def routed(routings: pa.Array, ids: pa.Array) -> pa.Array:
    """Return the ends of action lines with the routing (``{"routing":"..."}``) of each row before its ``_id``."""
    fields = pc.binary_slice(routings.cast(_TEXT), 1, -1)
    return pc.binary_join_element_wise(fields, ids.cast(_TEXT), arrow_buffers.text(",", _TEXT))


def indexed(names: pa.Array, ids: pa.Array) -> pa.Array:
    """Return the ends of action lines with the index of each row, a valid name, before them."""
    before, after, nothing = (arrow_buffers.text(part, _TEXT) for part in ('"_index":"', '",', ""))
    return pc.binary_join_element_wise(before, names.cast(_TEXT), after, ids.cast(_TEXT), nothing)


def action_heads(**metadata: Any) -> tuple[pa.Scalar, pa.Scalar]:
    """Return the beginnings of index and delete action lines, with ``metadata`` before their ``_id``."""
    fields = json.dumps(metadata, separators=(",", ":")).removesuffix("}")
    index, delete = (arrow_buffers.text(f'{{"{action}":{fields},', _TEXT) for action in ("index", "delete"))
    return index, delete


def create_heads() -> tuple[pa.Scalar, pa.Scalar]:
    """Return the beginning of create action lines, twice: no row of a data stream is a delete."""
    create = arrow_buffers.text('{"create":{', _TEXT)
    return create, create


def newer(operations: Sequence[tuple[Refusal, int]]) -> Request:
    """Return a request of refused operations, each with the version over whose smaller ones it is applied."""
    rendered = []
    for refused, version in operations:
        action = "delete" if refused.source is None else "index"
        fields = {"version": version, "version_type": "external", **refused.place, "_id": refused.id}
        head = json.dumps({action: fields}).encode() + b"\n"
        rendered.append(head if refused.source is None else head + refused.source.encode() + b"\n")
    offsets = np.cumsum([0, *map(len, rendered)], dtype=np.int64)
    rows = _chained([refused.row for refused, _ in operations])
    return Request(pa.py_buffer(b"".join(rendered)), offsets, rows=rows)


def position_ids(prefix: str, first: int, count: int) -> pa.Array:
    """Return the ends of action lines for rows without a key. ``_id`` is ``prefix`` and the row's number."""
    before, after, nothing = (arrow_buffers.text(part) for part in (f'"_id":"{prefix}', '"}', ""))
    numbers = arrow_buffers.numbers(np.arange(first, first + count)).cast(pa.large_string())
    return pc.binary_join_element_wise(before, numbers, after, nothing)


def render(
    ids: pa.Array, sources: pa.Array, heads: tuple[pa.Scalar, pa.Scalar], rows: pa.Table | None = None
) -> Request:
    """Return the operations of one batch. A NULL source means a delete; ``rows`` as in `Request`."""
    index, delete = heads
    ids, documents = ids.cast(_TEXT), sources.cast(_TEXT)
    newline, end = arrow_buffers.text("\n", _TEXT), arrow_buffers.text("}\n", _TEXT)
    if documents.null_count == 0:
        return _request(pc.binary_join_element_wise(index, ids, end, documents, newline, _NONE), ids, rows)
    head = pc.if_else(pc.is_valid(documents), index, delete)
    document = pc.fill_null(pc.binary_join_element_wise(documents, newline, _NONE), _NONE)
    return _request(pc.binary_join_element_wise(head, ids, end, document, _NONE), ids, rows)


def _request(operations: pa.Array, ends: pa.Array, rows: pa.Table | None) -> Request:
    if len(operations) == 0:  # Arrow may leave out the buffers
        return Request(pa.py_buffer(b""), np.zeros(1, np.int64))
    _, offsets, data = operations.buffers()
    numbers = np.frombuffer(offsets, np.int64)[operations.offset : operations.offset + len(operations) + 1]
    return Request(data, numbers, ends, rows)


def gathered(requests: Iterable[Request], size: int) -> Iterator[Request]:
    """Join small requests up to ``size`` bytes, because an epoch of many tasks may have only a few rows in each."""
    waiting: list[Request] = []
    total = 0
    for request in requests:
        if waiting and total + request.size > size:
            yield joined(waiting)
            waiting, total = [], 0
        waiting.append(request)
        total += request.size
    if waiting:
        yield joined(waiting)


def joined(requests: Sequence[Request]) -> Request:
    """Return one request of all operations of one epoch, in order."""
    if len(requests) == 1:
        return requests[0]
    ends = [request.ends for request in requests if request.ends is not None]
    starts = np.cumsum([0, *(request.size for request in requests)], dtype=np.int64)
    parts = [start + request.offsets[1:] - request.offsets[0] for start, request in zip(starts, requests, strict=False)]
    return Request(
        pa.py_buffer(b"".join(request.body for request in requests)),
        np.concatenate([starts[:1], *parts]),
        pa.concat_arrays(ends) if len(ends) == len(requests) else None,
        _chained([request.rows for request in requests]),
    )


def _chained(rows: Sequence[pa.Table | None]) -> pa.Table | None:
    """Return the rows of several requests without a copy; None if those of one are not known."""
    known = [each for each in rows if each is not None]
    return pa.concat_tables(known) if known and len(known) == len(rows) else None


def cut(request: Request, size: int) -> Iterator[Request]:
    """Yield the operations in requests of at most ``size`` bytes. A larger operation gets a request of its own."""
    while len(request):
        first, request = request.split(size)
        yield first


class Operations:
    """Renders the rows of one task.

    ``seen`` is the number of rows and ``keyed`` whether they have keys; both are known once all rows are rendered.
    ``partition`` is the task's place in the epoch, ``size`` the bytes of a request. ``indices`` are those of the epoch,
    for rows that name theirs; rows with any other name, and rows that no request can hold, are not rendered, and added
    to ``unplaced``. With ``creates`` the rows have no key, and are appended to a data stream.
    """

    def __init__(
        self,
        identity: Identity,
        epoch: Epoch,
        partition: int,
        task: str,
        *,
        size: int,
        indices: Collection[str] = (),
        creates: bool = False,
    ) -> None:
        attempt = epoch.attempt if creates else None
        self.prefix = f"{document_id_prefix(identity_key(identity), epoch.number, attempt)}{partition}-"
        self._creates = creates
        self._partition = partition
        self._version = identity.origin["base"] + epoch.number
        self._task = task
        self._size = size
        self._indices = pa.array(indices, pa.string())
        self.unplaced: list[Refusal] = []
        self.seen = 0
        self.keyed = False

    def requests(self, rows: Rows, survives: npt.NDArray[np.bool_] | None) -> Iterator[Request]:
        """Yield requests for the rows whose flag in ``survives`` is set; None for all rows."""
        # gte: the epoch may be applied again, and its documents then have this version
        heads = create_heads() if self._creates else action_heads(version=self._version, version_type="external_gte")
        for batches in _gathered(rows.read(self._task), self._size):
            # The spool says whether rows have a key, because a restart with other options must not change that.
            self.keyed = "id" in batches[0].schema.names
            for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():
                mask = None if survives is None else pa.array(survives[self.seen : self.seen + len(batch)])
                ids = batch["id"] if self.keyed else position_ids(self.prefix, self.seen, len(batch))
                yield from cut(self._rendered(batch, ids, mask, heads), self._size)
                self.seen += len(batch)

    def _rendered(
        self, batch: pa.RecordBatch, ids: pa.Array, mask: pa.Array | None, heads: tuple[pa.Scalar, pa.Scalar]
    ) -> Request:
        """Return the operations of the rows of ``mask`` that a request can hold; add the others to ``unplaced``."""
        mask = _both(mask, self._fit(batch, mask))
        mask = _both(mask, self._placed(batch, ids, mask))
        if mask is not None:
            batch, ids = batch.filter(mask), ids.filter(mask)
        return render(action_ends(batch, ids), batch["source"], heads, pa.Table.from_batches([batch]))

    def _fit(self, batch: pa.RecordBatch, mask: pa.Array | None) -> pa.Array | None:
        """Return which rows a request can hold, None if it can hold all; add the others of ``mask`` to ``unplaced``."""
        if not (wrong := unfit(batch)):
            return None
        for place, reason in wrong.items():
            if mask is None or mask[place].as_py():
                name = ""
                if self.keyed and reason.error != INVALID_KEY:
                    name = json.loads(f"{{{batch['id'][place].as_py()}")["_id"]
                self._set_aside(batch, place, name, reason.error, reason.reason)
        fit = np.ones(len(batch), np.bool_)
        fit[list(wrong)] = False
        return pa.array(fit)

    def _placed(self, batch: pa.RecordBatch, ids: pa.Array, mask: pa.Array | None) -> pa.Array | None:
        """Return which rows name an index of the epoch, None if none names any; likewise."""
        if "index" not in batch.schema.names:
            return None
        placed = pc.is_in(batch["index"], self._indices)
        for place in np.flatnonzero(~placed.to_numpy(zero_copy_only=False)).tolist():
            if mask is None or mask[place].as_py():
                index = shown_text(batch["index"][place])
                reason = f"index_by= gives {index!r}, which is not the name of an index of this epoch"
                name = json.loads(f"{{{ids[place].as_py()}")["_id"]
                self._set_aside(batch, place, name, "invalid_index_name_exception", reason)
        return placed

    def _set_aside(self, batch: pa.RecordBatch, place: int, name: str, error: str, reason: str) -> None:
        where = {}
        if "index" in batch.schema.names and (index := shown_text(batch["index"][place])) is not None:
            where["_index"] = index
        if "routing" in batch.schema.names and (routing := json.loads(batch["routing"][place].as_py()).get("routing")):
            where["routing"] = routing
        row = pa.Table.from_batches([batch]).take(arrow_buffers.numbers(np.array([place])))
        source = document_of(batch["source"][place].as_py())
        position = f"{self._partition}-{self.seen + place}"
        self.unplaced.append(Refusal(name, source, _BAD_REQUEST, error, reason, where, position, row))


def _both(one: pa.Array | None, other: pa.Array | None) -> pa.Array | None:
    return pc.and_(one, other) if one is not None and other is not None else one if other is None else other


def shown_text(value: pa.Scalar) -> str | None:
    """Return a text for people: bytes that are not UTF-8 are escaped."""
    return value.as_buffer().to_pybytes().decode(errors="backslashreplace") if value.is_valid else None


def unfit(batch: pa.RecordBatch) -> dict[int, Unfit]:
    """Return the rows that no request can hold, by their place."""
    checks = {"source": unfit_values, "routing": unfit_routings, "id": unfit_ids}
    reasons = (each for name, check in checks.items() if name in batch.schema.names for each in check(batch[name]))
    return dict(sorted({each.place: each for each in reasons}.items()))


def action_ends(batch: pa.RecordBatch, ids: pa.Array) -> pa.Array:
    """Return the ends of the action lines of rows: the index and the routing that they name, and their ``_id``."""
    if "routing" in batch.schema.names:
        ids = routed(batch["routing"], ids)
    return indexed(batch["index"], ids) if "index" in batch.schema.names else ids


def _gathered(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield small batches in groups of at least ``size`` bytes."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(each.nbytes for each in gathered) >= size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
