"""The mutants of deciding modules that the simulation cannot see by construction, each with the reason."""

from __future__ import annotations

from typing import Final

_SQL: Final = "text of SQL: the server in memory is asked by the methods of `Database`, and reads none"
_LOOKED_AT: Final = (
    "what is prepared again is looked at once more before it is recorded, and that stops with the same error"
)
_COUNTED: Final = "the count of rows stops the copy as well, with the same error; only its words are others"

_VALID: Final = "each row of the simulation has a valid key"
_ACCEPTED: Final = "the spool in memory lists the tasks that were accepted, and no others"
_ALIAS: Final = "the cluster in memory has no aliases"
_ONE: Final = "one thread sends all requests, one after another, to one node"
_ROUTING: Final = "the cluster in memory has indices of one shard, and no routing"
_BY: Final = "the sinks of the simulation write to one index: no row names its own"
_STREAM: Final = "the cluster in memory has no data streams"
_RANKS: Final = "each row with a key has a rank, which says which is the newest"
_SMALL: Final = "an epoch of so many rows takes too long to play"

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
    (
        "elasticsearch/deduplicate.py",
        '                ranked = ranked.set_column(0, "id", _different(ranked.column("id"), numbers))\n',
    ): _VALID,
    ("elasticsearch/committer.py", "        if over_limit(unfit, total, self._config.letters_limit):\n"): _VALID,
    ("elasticsearch/committer.py", "        if set(tasks) != set(expected):\n"): _ACCEPTED,
    ("elasticsearch/deduplicate.py", "    if across:\n"): _RANKS,
    ("elasticsearch/deduplicate.py", 'kept = last(pa.Table.from_batches(kept), "id", "task").to_batches()'): _SMALL,
    ("elasticsearch/dead_letter.py", '    for index in sorted({letter["_index"] for letter in letters}):\n'): _ALIAS,
    ("elasticsearch/target_index.py", "    unfit = _unfit(name, mine) if name and mine else None\n"): _ALIAS,
    ("elasticsearch/apply.py", "            target.posted_to,\n            self._config.timeout,\n"): _ALIAS,
    ("elasticsearch/committer.py", "min(at_once, MOST_AT_ONCE)"): _ONE,
    (
        "elasticsearch/bulk_body.py",
        '    return {name: fields[name] for name in ("_index", "routing") if name in fields}\n',
    ): _ROUTING,
    (
        "elasticsearch/letters.py",
        "            if name is None or not is_index_name(name) or name in (self._index, MARKERS):\n",
    ): _BY,
    ("elasticsearch/apply.py", "        if self._target.appends and len(self._target.indices) > 1:\n"): _STREAM,
    ("elasticsearch/letters.py", "[name not in stored for name in names]"): _STREAM,
    ("elasticsearch/letters.py", "            if stream.indices == before.indices:\n"): _STREAM,
    ("elasticsearch/committer.py", "            self._require_fit(target)\n"): _BY,
}
"""The reason by file and changed text."""
