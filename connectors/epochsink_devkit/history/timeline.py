"""Arrange the source rows of a history, and the epochs that must deliver them, as arrays.

All epochs of all runs form one sequence, with the runs in the order of their start. An epoch's *position* is its index
in it. Source rows have an index. Rows of one key are ordered by (run, kver), and *rank* is a row's place if all rows
are sorted by key and then in that order. Everything here is linear in the number of rows, or one sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from epochsink_devkit.history.history import EpochFacts, History
from epochsink_devkit.history.rows import SOURCE_SCHEMA

if TYPE_CHECKING:
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

UNKNOWN = -1


class Timeline:
    """Source rows and epochs of one history. Raises `ValueError` if a partition's offsets are not 0, 1, 2, ..."""

    def __init__(self, history: History) -> None:
        self.runs = {run: place for place, run in enumerate(history.inputs)}
        self.epochs: list[EpochFacts] = sorted(
            (epoch for epoch in history.epochs.values() if epoch.run in self.runs),
            key=lambda epoch: (self.runs[epoch.run], epoch.number),
        )
        self.number = np.array([*(epoch.number for epoch in self.epochs), UNKNOWN - 1], dtype=np.int64)
        self.positions = {(epoch.run, epoch.number): place for place, epoch in enumerate(self.epochs)}
        sources = [source.select(SOURCE_SCHEMA.names) for source in history.inputs.values()]
        self.source: pa.Table = pa.concat_tables([SOURCE_SCHEMA.empty_table(), *sources]).combine_chunks()
        self._run = np.repeat(np.arange(len(sources)), [source.num_rows for source in sources])
        self._lay_out()
        self._assign_epochs()
        self._sort_keys()

    def __len__(self) -> int:
        return len(self.epochs)

    def _lay_out(self) -> None:
        """Find the index of each source row by its run, partition and offset."""
        part, off = _numbers(self.source, "src_part"), _numbers(self.source, "src_off")
        self._partitions = int(part.max(initial=0)) + 1
        place = self._run * self._partitions + part
        order = np.lexsort((off, place))
        counts = np.bincount(place, minlength=max(len(self.runs), 1) * self._partitions)
        self._first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        self._count = counts
        if not np.array_equal(off[order], np.arange(len(off)) - self._first[place[order]]):
            raise ValueError("the offsets of a source partition are not 0, 1, 2, ...: the checker needs them dense")
        self.source = self.source.take(order)
        self._run = self._run[order]
        self.key = _numbers(self.source, "key")
        self.kver = _numbers(self.source, "kver")
        self.deletes: Flags = np.array(self.source["op"].to_numpy() == "D", dtype=bool)

    def _assign_epochs(self) -> None:
        """Find the position of the epoch whose offsets include each source row, or len(self) if there is none."""
        self.position = np.full(self.source.num_rows, len(self), dtype=np.int64)
        for run, place in self.runs.items():
            mine = [at for at, epoch in enumerate(self.epochs) if epoch.run == run]
            for part in range(self._partitions):
                cell = place * self._partitions + part
                ends = np.maximum.accumulate([self.epochs[at].ends.get(part, 0) for at in mine] or [0])
                which = np.searchsorted(ends, np.arange(self._count[cell]), side="right")
                known = np.array([*mine, len(self)], dtype=np.int64)
                self.position[self._first[cell] : self._first[cell] + self._count[cell]] = known[
                    np.minimum(which, len(mine))
                ]

    def _sort_keys(self) -> None:
        self._order = np.lexsort((self.kver, self._run, self.key))
        self.rank = np.empty(len(self._order), dtype=np.int64)
        self.rank[self._order] = np.arange(len(self._order))
        in_order = self.key[self._order]
        starts = np.concatenate(([True], in_order[1:] != in_order[:-1])) if len(in_order) else np.empty(0, dtype=bool)
        self.key_count = int(starts.sum())
        self.key_code = np.empty(len(self._order), dtype=np.int64)
        self.key_code[self._order] = np.cumsum(starts) - 1
        self._shows = self._epochs_that_show()

    def _epochs_that_show(self) -> Flags:
        """Flag the epochs that leave a row in a keyed target. An epoch of deletes does not."""
        shows = np.zeros(len(self) + 1, dtype=bool)
        codes, positions = self.key_code[self._order], self.position[self._order]
        last = np.ones(len(codes), dtype=bool)
        last[:-1] = (codes[1:] != codes[:-1]) | (positions[1:] != positions[:-1])
        shows[positions[last & ~self.deletes[self._order]]] = True
        return shows

    def shows(self, position: int) -> bool:
        """Return whether an epoch leaves a row in a keyed target after it is applied."""
        return bool(self._shows[position])

    def locate(self, rows: pa.Table) -> Ints:
        """Return the source index of each row of a read, or `UNKNOWN` if there is no such source row."""
        runs = rows["run"].combine_chunks().dictionary_encode()
        places = np.array([self.runs.get(run, UNKNOWN) for run in runs.dictionary.to_pylist()], dtype=np.int64)
        run = _gather(places, runs.indices)
        part, off = _numbers(rows, "src_part"), _numbers(rows, "src_off")
        known = (run >= 0) & (part >= 0) & (part < self._partitions)
        cell = np.where(known, run * self._partitions + part, 0)
        known &= (off >= 0) & (off < self._count[cell]) if len(self._count) else False
        return np.where(known, self._first[cell] + off, UNKNOWN)

    def newest_of_keys(self, rows: Flags) -> Ints:
        """Return the indices of the newest flagged source row of each key."""
        chosen = self._order[rows[self._order]]
        codes = self.key_code[chosen]
        last = np.ones(len(codes), dtype=bool)
        last[:-1] = codes[1:] != codes[:-1]
        return chosen[last]

    def in_key_order(self, ranks: Ints) -> Ints:
        """Return the indices of the rows at these ranks, or of the last row for larger ranks."""
        return self._order[np.minimum(ranks, len(self._order) - 1)]

    def describe(self, index: int) -> str:
        """Return a readable name of a source row."""
        run = list(self.runs)[self._run[index]]
        part, off = self.source["src_part"][index].as_py(), self.source["src_off"][index].as_py()
        return (
            f"{run}/{part}/{off} (key {self.key[index]} version {self.kver[index]}, {self.name(self.position[index])})"
        )

    def name(self, position: int) -> str:
        """Return a readable name of an epoch."""
        if position >= len(self):
            return "no epoch"
        epoch = self.epochs[position]
        return f"epoch {epoch.number} of {epoch.run}"


def _numbers(table: pa.Table, column: str) -> Ints:
    return np.asarray(table[column].fill_null(UNKNOWN).to_numpy(), dtype=np.int64)


def _gather(values: Ints, indices: pa.Array) -> Ints:
    if not len(values):
        return np.full(len(indices), UNKNOWN, dtype=np.int64)
    return values[np.asarray(indices.to_numpy(zero_copy_only=False), dtype=np.int64)]
