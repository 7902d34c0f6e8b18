"""Make rows that prove where they went: each contains its place in the source, its epoch and its attempt.

All columns but three follow from the row's place in the source, so the checker knows every expected row.
`Workload.stream` makes these on the stream, as SQL. Only a call of foreachBatch knows ``epoch`` (its batch id) and
``attempt`` (a new uuid): `Workload.batch` adds them there, with the checksum over all columns. Rows do not contain the
number of rows of their epoch: the checkpoint's ``offsets/N`` tells which rows belong to it, and counting them in the
batch would take another pass over the input.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("src_part", pa.int32()),
        ("src_off", pa.int64()),
        ("epoch", pa.int64()),
        ("attempt", pa.string()),
        ("key", pa.int64()),
        ("kver", pa.int64()),
        ("op", pa.string()),
        ("crc", pa.int64()),
    ]
)
"""The proof columns. ``run`` names the checkpoint; (``src_part``, ``src_off``) is the place in the source, dense from
0; ``kver`` counts the rows of a key from 0; ``op`` is U (upsert) or D (delete); ``crc`` covers all columns before."""

SOURCE_SCHEMA: Final = pa.schema([SCHEMA.field(name) for name in ("src_part", "src_off", "key", "kver", "op")])
"""The columns of each source row that the checker needs."""

_STRIDE: Final = 7919
"""A prime, so that neighbours in the source have distant keys."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Keyed rows as a function of their place in the source.

    Each source partition has ``keys`` keys of its own (a number that 7919 does not divide), each visited once in
    ``keys`` consecutive rows; about one version in ``deletes`` deletes its key.
    """

    keys: int = 97
    deletes: int = 5

    def stream(self, *, run: str, partition: str = "partition", offset: str = "offset") -> list[str]:
        """Return SQL expressions for `SCHEMA`, to evaluate on the stream.

        ``partition`` and ``offset`` are SQL over the source's columns. ``run`` (letters, digits, ``-`` and ``_``)
        becomes a literal. Columns that only the batch knows get placeholders, so that the stream has the final schema.
        """
        if not run.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"run={run!r}: expected letters, digits, - and _")
        part, off = f"cast({partition} AS bigint)", f"cast({offset} AS bigint)"
        key = f"({part} * {self.keys} + ({off} * {_STRIDE}) % {self.keys})"
        kver = f"({off} div {self.keys})"
        return [
            f"'{run}' AS run",
            f"cast({partition} AS int) AS src_part",
            f"{off} AS src_off",
            "cast(-1 AS bigint) AS epoch",
            "'' AS attempt",
            f"{key} AS key",
            f"{kver} AS kver",
            f"if(({kver} + {key}) % {self.deletes} = {self.deletes - 1}, 'D', 'U') AS op",
            "cast(-1 AS bigint) AS crc",
        ]

    @staticmethod
    def batch(*, epoch: int, attempt: str) -> list[str]:
        """Return SQL expressions that stamp the rows of one foreachBatch call; ``attempt`` is hex."""
        stamps = {"epoch": f"cast({epoch} AS bigint)", "attempt": f"'{attempt}'"}
        values = {name: stamps.get(name, name) for name in SCHEMA.names[:-1]}
        joined = ", ".join(f"cast({value} AS string)" for value in values.values())
        values["crc"] = f"crc32(cast(concat_ws('|', {joined}) AS binary))"
        return [f"{value} AS {name}" for name, value in values.items()]

    def source(self, ends: Mapping[int, int]) -> pa.Table:
        """Return the source rows (`SOURCE_SCHEMA`) of partitions that end before the given offsets."""
        parts = [np.full(end, part, dtype=np.int64) for part, end in sorted(ends.items())]
        part = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
        off = np.concatenate([*(np.arange(end) for _, end in sorted(ends.items())), np.empty(0, dtype=np.int64)])
        key = part * self.keys + (off * _STRIDE) % self.keys
        kver = off // self.keys
        op = np.where((kver + key) % self.deletes == self.deletes - 1, "D", "U")
        columns = [part.astype(np.int32), off.astype(np.int64), key, kver, pa.array(op, pa.string())]
        return pa.Table.from_arrays([pa.array(column) for column in columns], schema=SOURCE_SCHEMA)


def stamp(source: pa.Table, *, run: str, epoch: int, attempt: str) -> pa.Table:
    """Return source rows equal to those of `Workload`'s SQL, for tests without Spark."""
    count = source.num_rows
    columns = {
        "run": pa.array([run] * count, pa.string()),
        "epoch": pa.array([epoch] * count, pa.int64()),
        "attempt": pa.array([attempt] * count, pa.string()),
        **{name: source[name] for name in SOURCE_SCHEMA.names},
    }
    table = pa.table([columns[name] for name in SCHEMA.names[:-1]], names=SCHEMA.names[:-1])
    return table.append_column("crc", pa.array(checksums(table), pa.int64()))


def checksums(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Return the expected ``crc`` of each row; -2, which never matches, if a column is null."""
    texts = [pc.cast(rows[name], pa.string()) for name in SCHEMA.names[:-1]]
    joined = pc.binary_join_element_wise(*texts, "|")
    texts_of_rows = joined.to_pylist()
    return np.array([-2 if text is None else zlib.crc32(text.encode()) for text in texts_of_rows], dtype=np.int64)
