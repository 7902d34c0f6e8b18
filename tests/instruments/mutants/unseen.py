"""The mutants of deciding modules that the simulation cannot see by construction, each with the reason."""

from __future__ import annotations

from typing import Final

_SQL: Final = "text of SQL: the server in memory is asked by the methods of `Database`, and reads none"
_LOOKED_AT: Final = (
    "what is prepared again is looked at once more before it is recorded, and that stops with the same error"
)
_COUNTED: Final = "the count of rows stops the copy as well, with the same error; only its words are others"

UNSEEN: Final[dict[tuple[str, str], str]] = {
    ("postgres/staging.py", "        connection.execute(lock)\n"): _SQL,
    ("postgres/staging.py", "        if not self.logged:\n"): _SQL,
    ("postgres/staging.py", 'sql.SQL("" if self.logged else "UNLOGGED")'): _SQL,
    ("postgres/compared.py", "        connection.execute(whole, binary=True)\n"): _SQL,
    ("postgres/compared.py", "        if value not in text and"): _SQL,
    ("postgres/compared.py", "        if constants:\n"): _SQL,
    ("postgres/sink_table.py", '            "accumulate": merge.accumulate,\n'): (
        "the table in memory has one column, which is the key: there is nothing to combine"
    ),
    ("kafka/topic_log.py", "if 0 <= at < after:"): _LOOKED_AT,
    ("kafka/topic_log.py", "if self.topic_id != topic_id:"): _LOOKED_AT,
    ("kafka/redo.py", "        if not batch.is_whole:\n"): _COUNTED,
    ("kafka/redo.py", "        if self._found > self._rows:\n"): _COUNTED,
    ("kafka/record_batch.py", " and self.records == self.last_offset_delta + 1"): _COUNTED,
    (
        "kafka/witness.py",
        "            if start != _NOT_OPEN and epochs.get(state.producer_id) == state.producer_epoch:\n",
    ): ("another use of the id is noticed before the vote by its coordinator, and after it by where its rows begin"),
    ("kafka/rows_in_log.py", " or self._noted.attempt != epoch.attempt:"): (
        "the coordinator votes on the attempt that it has begun last, and on no other"
    ),
}
"""The reason by file and changed text."""
