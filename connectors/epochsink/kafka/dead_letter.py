"""Find rows that a topic cannot take, and send each as a dead letter to another topic, in the same transaction.

A letter is a record like any other: the vote, the commit and the redo count it among the rows of its transaction. Its
value is the row as the writer got it, in Arrow: a retry writes that, and nothing that was rendered for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from epochsink import arrow_buffers
from epochsink.errors import RowsRejected
from epochsink.kafka.rendered_value import as_value, marked
from epochsink.sink import Task, identity_key
from epochsink.sink.letter_row import encode_row, render_row

CLIENT_OVERHEAD: Final = 36
"""What librdkafka adds to key, value and headers before it compares a row with its message.max.bytes."""

_BATCH_HEADER: Final = 61
_LONGEST_OVERHEAD: Final = _BATCH_HEADER + 23
"""With what comes before a batch's first record: its length, attributes, deltas, and lengths of key, value, headers."""
_VARINT_STEPS: Final = np.array([1 << 6, 1 << 13, 1 << 20, 1 << 27])
"""The numbers, as Kafka writes them, that need one byte more."""

NO_KEY: Final = "the row has no key"
_HEADER_NAME: Final = "the row has a header whose key is not UTF-8"
SETTLED: Final = "settled"
"""The header of a record that settles a letter: it stands in the letter's partition, so that no retention deletes it
first."""
WRITTEN: Final = "written"
DROPPED: Final = "dropped"
ROW: Final = "row"
"""The header with the beginning of the row as JSON, for people; the letter's value is the row itself."""
_SHOWN: Final = 1_000
"""How many characters of the row that header has."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, in one attempt, which rows become letters; ``topic`` is that of the letters.

    ``largest_message`` and ``largest_batch`` are the client's and the sink's topic's max. in bytes, ``largest_letter``
    that of the topic of letters. Recorded with the rows, so that a later start finds the same letters.
    """

    topic: str
    largest_message: int
    largest_batch: int
    largest_letter: int
    needs_key: bool

    def to_json(self) -> dict[str, Any]:
        """Return what tasks are told, and the ledger records."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self | None:
        """Return the rules that `to_json` wrote; None if there are none."""
        return cls(**document) if document else None

    def options(self, options: Mapping[str, str], batch_size: int) -> dict[str, str]:
        """Return the client's options with which it takes letters too, and batches of rows are not larger for that."""
        size = min(int(options.get("batch.size", batch_size)), self.largest_message, self.largest_batch)
        largest = max(self.largest_message, self.largest_letter)
        return {**options, "batch.size": str(size), "message.max.bytes": str(largest)}


class RefusedRows(NamedTuple):
    """The rows of a batch that become letters, in order: their indices, and why."""

    rows: NDArray[Any]
    reasons: Sequence[str]


def refused(batch: pa.RecordBatch, messages: NDArray[Any], rules: Rules) -> RefusedRows | None:
    """Return the rows that the sink's topic cannot take; None if it takes all. ``messages`` are the batch's rows."""
    reasons: dict[int, str] = {}
    sizes = messages["len"] + messages["key_len"]
    if "headers" in batch.schema.names:
        sizes = sizes + _header_bytes(batch.column("headers"))
    # one comparison for nearly all batches: the exact size matters only within some bytes of the limit
    doubtful = min(rules.largest_message - CLIENT_OVERHEAD + _LONGEST_OVERHEAD, rules.largest_batch)
    for row in np.flatnonzero(sizes + np.uint64(_LONGEST_OVERHEAD) > doubtful):
        if why := _why_too_large(int(sizes[row]), messages[row], rules):
            reasons[int(row)] = why
    reasons |= unfit(batch)
    if rules.needs_key:
        for row in np.flatnonzero(messages["key"] == 0):
            reasons.setdefault(int(row), NO_KEY)
    if not reasons:
        return None
    rows = sorted(reasons)
    return RefusedRows(np.array(rows), [reasons[row] for row in rows])


def unfit(batch: pa.RecordBatch) -> dict[int, str]:
    """Return the rows that no message can hold as they are, by number, with the reason."""
    reasons = dict(marked(batch))
    if "headers" in batch.schema.names:
        column = batch.column("headers")
        if wrong := arrow_buffers.not_utf8(column.flatten().field("key")):
            parents = arrow_buffers.to_numpy(pc.list_parent_indices(column))
            reasons |= {int(parents[entry]): _HEADER_NAME for entry in wrong}
    return reasons


@dataclass(frozen=True, slots=True)
class Sender:
    """Makes the letters of one task. ``target`` is the sink's topic."""

    rules: Rules
    task: Task
    target: str

    def letters(
        self, batch: pa.RecordBatch, found: RefusedRows, before: int
    ) -> tuple[pa.RecordBatch, list[list[dict[str, Any]]]]:
        """Return the letters of a batch, in order, as a batch with ``value`` alone, and the headers of each.

        ``before`` rows of the task came before the batch. Raises `RowsRejected` if a letter is too large.
        """
        rows = batch.take(arrow_buffers.numbers(found.rows))
        values, headers = [], []
        for index, (number, why) in enumerate(zip(found.rows.tolist(), found.reasons, strict=True)):
            row = rows.slice(index, 1)
            values.append(encode_row(row))
            headers.append(self._headers(why, before + number, row))
            self._refuse_too_large(values[-1], headers[-1])
        return pa.RecordBatch.from_arrays([arrow_buffers.texts(values, pa.binary())], names=["value"]), headers

    def _headers(self, why: str, number: int, row: pa.RecordBatch) -> list[dict[str, Any]]:
        identity, epoch = self.task.identity, self.task.epoch
        headers = {
            "error": why,
            "sink": identity.sink,
            "target": self.target,
            "query_id": identity.query_id,
            "epoch": str(epoch.number),
            "attempt": epoch.attempt,
            "key": identity_key(identity),
            "position": f"{self.task.partition}/{number}",
            ROW: _cut(json.dumps(rendered(row), ensure_ascii=False)),
        }
        return _encoded(headers)

    def _refuse_too_large(self, value: bytes, headers: Sequence[Mapping[str, Any]]) -> None:
        size = len(value) + sum(len(header["key"]) + len(header["value"]) + 10 for header in headers)
        if (letter := batch_bytes(size, 0, len(value))) > self.rules.largest_letter:
            raise RowsRejected(
                f"a row that topic '{self.target}' cannot take makes a dead letter of {letter} bytes, more than "
                f"max.message.bytes = {self.rules.largest_letter} of topic '{self.rules.topic}' allows",
                hint=f"raise max.message.bytes of topic '{self.rules.topic}', or keep such rows out with where=",
            )


def rendered(row: pa.RecordBatch) -> dict[str, Any]:
    """Return a single row as JSON can hold it, for people; the bytes of a message are shown as text."""
    plain = as_value(row)
    return render_row(pa.RecordBatch.from_arrays([_as_text(column) for column in plain.columns], plain.schema.names))


def settlement(key: str, letter: str, how: str) -> list[dict[str, Any]]:
    """Return the headers of the record which says that the letter named ``letter`` of a sink is none any more."""
    return _encoded({"key": key, "letter": letter, SETTLED: how})


def _encoded(headers: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name.encode(), "value": value.encode()} for name, value in headers.items()]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _as_text(column: pa.Array) -> pa.Array:
    """Return bytes as strings, unchecked; also those in headers."""
    if pa.types.is_binary(column.type):
        return column.view(pa.string())
    if pa.types.is_large_binary(column.type):
        return column.view(pa.large_string())
    if pa.types.is_list(column.type):
        entries = column.flatten()
        fields = [_as_text(entries.field(place)) for place in range(entries.type.num_fields)]
        names = [field.name for field in entries.type]
        return pa.ListArray.from_arrays(_offsets(column), pa.StructArray.from_arrays(fields, names))
    return column


def _offsets(column: pa.ListArray) -> pa.Array:
    """Return where each list begins among the entries of all of them."""
    lengths = arrow_buffers.to_numpy(pc.fill_null(pc.list_value_length(column), arrow_buffers.number(0, "int32")))
    return arrow_buffers.numbers(np.concatenate([[0], np.cumsum(lengths)]).astype("i4"))


def _why_too_large(size: int, message: Any, rules: Rules) -> str | None:
    if size > rules.largest_message - CLIENT_OVERHEAD:
        return f"the row is larger than message.max.bytes = {rules.largest_message} of the client allows"
    key, value = int(message["key_len"]), int(message["len"])
    if batch_bytes(size, key, value) > rules.largest_batch:
        return f"the row is larger than max.message.bytes = {rules.largest_batch} of the topic allows"
    return None


def batch_bytes(size: int, key: int, value: int) -> int:
    """Return the bytes of a batch with one row: ``size`` is that of key, value and headers together."""
    # attributes, and the two deltas and the number of headers, of one byte each for less than 64 headers
    body = 4 + int(_varint(np.array([key, value])).sum()) + size
    return int(_BATCH_HEADER + _varint(np.array([body]))[0] + body)


def _varint(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return how many bytes Kafka needs for non-negative numbers."""
    return np.searchsorted(_VARINT_STEPS, numbers, side="right") + 1


def _header_bytes(column: pa.ListArray) -> NDArray[Any]:
    """Return the bytes of each row's headers, with the lengths before them."""
    entries = column.flatten()
    total = np.zeros(len(column), dtype="u8")
    parents = arrow_buffers.to_numpy(pc.list_parent_indices(column))
    for name in ("key", "value"):
        lengths = pc.binary_length(entries.field(name)).cast(pa.int64())
        bytes_of = arrow_buffers.to_numpy(pc.fill_null(lengths, arrow_buffers.number(0, "int64")))
        total += np.bincount(parents, weights=bytes_of + _varint(bytes_of), minlength=len(column)).astype("u8")
    return total
