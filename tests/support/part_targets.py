"""Targets that cannot take all rows, the dead letters of what they refuse, and a table that adds rows up."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg
from elasticsearch import Elasticsearch
from elasticsearch.helpers import scan
from harness import WORKLOAD, Watch, make_topic

from epochsink.sink.letter_row import decode_rows
from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import LiteralString

PART: Final = "some-rows"
"""A topic and an index that cannot take all rows; likewise the table "part"."""
LETTERS: Final = f"{PART}.dead_letter"
"""The topic and the index of their dead letters."""
NO_KEY: Final = "src_off % 7 = 3"
WRONG: Final = "src_off % 11 = 5"
"""Too large for the topic, refused by the table's constraint, no address for the index."""
KEY: Final = f"CASE WHEN NOT ({NO_KEY}) THEN key END"
PLACE: Final = ["src_part", "src_off"]
ASIDE: Final = {"on_rejected": "dead_letter", "letters_limit": 0.9}

PARTS: Final = {"part_table", "part_topic", "part_index"}
_ENDS_SECONDS: Final = 10.0
"""How long readers of a topic may wait at the end: a coordinator answers before it writes a transaction's end."""

Place = tuple[int, int]
"""A row's partition and offset in the source."""


class PartTargets:
    """One of each service, in so many copies. A service whose address is empty has none."""

    def __init__(self, servers: str, dsn: str, urls: str | list[str], copies: int = 1) -> None:
        self._servers = servers
        self._dsn = dsn
        self._urls = urls
        self._copies = copies

    def make(self) -> None:
        """Make tables, topic and index."""
        if self._dsn:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                connection.execute(
                    'CREATE TABLE counts (key bigint PRIMARY KEY, "rows" bigint, total bigint, latest bigint)'
                )
                # without a unique key, which would hide doubled rows
                connection.execute(
                    f"CREATE TABLE part (src_part int, src_off bigint CHECK (NOT ({WRONG})), id bigint NOT NULL)"
                )
        if self._servers:
            make_topic(self._servers, PART, {"max.message.bytes": "2000"}, copies=self._copies)
        if self._urls:
            with closing(Elasticsearch(self._urls)) as client:
                client.indices.create(
                    index=PART,
                    settings={"number_of_replicas": self._copies - 1},
                    mappings={"properties": {"address": {"type": "ip"}}},
                )

    def sinks(self) -> dict[str, dict[str, Any]]:
        """Return the sinks, as `pipeline.Spec` has them."""
        sinks: dict[str, dict[str, Any]] = {}
        if self._dsn:
            postgres = {"kind": "Postgres", "dsn": self._dsn}
            sinks["counts"] = {
                **postgres,
                "table": "counts",
                "key": ["key"],
                "select": ["key", "1L AS rows", "src_off AS total", "kver AS latest"],
                "accumulate": {"rows": "sum", "total": "sum", "latest": "max"},
            }
            sinks["part_table"] = {**postgres, "table": "part", "select": [*PLACE, f"{KEY} AS id"], **ASIDE}
        if self._servers:
            sinks["part_topic"] = {
                "kind": "Kafka",
                "bootstrap_servers": self._servers,
                "topic": PART,
                "key": KEY,
                "select": [*PLACE, "key", f"repeat('x', CASE WHEN {WRONG} THEN 3000 ELSE 1 END) AS filler"],
                **ASIDE,
            }
        if self._urls:
            sinks["part_index"] = {
                "kind": "Elasticsearch",
                "hosts": self._urls,
                "index": PART,
                "key": "id",
                "select": [
                    *PLACE,
                    f"CASE WHEN NOT ({NO_KEY}) THEN 2 * src_off + src_part END AS id",
                    f"CASE WHEN {WRONG} THEN 'none' ELSE '127.0.0.1' END AS address",
                ],
                "dead_letter_index": LETTERS,
                **ASIDE,
            }
        return sinks

    def appended(self) -> dict[str, Counter[Place]]:
        """Return how often each row is in the sinks that only append, with those among its dead letters."""
        held: dict[str, Counter[Place]] = {}
        if self._dsn:
            rows = Counter[Place](self._rows("SELECT src_part, src_off FROM part"))
            held["part_table"] = rows + self._letters("part_table")
        if self._servers:
            held["part_topic"] = Counter(self._topic())
        if self._urls:
            held["part_index"] = Counter(self._index())
        return held

    def without_key(self) -> dict[str, Counter[Place]]:
        """Return how often each row is among the dead letters of a sink of which all rows without a key are."""
        return {}

    def keyed(self) -> dict[str, dict[int, Place]]:
        """Return the place of the row that is stored for each key; a key of two documents has the place (-1, -1)."""
        return {}

    def counts(self) -> dict[int, tuple[int, int, int]] | None:
        """Return what has accumulated for each key; None if nothing does."""
        if not self._dsn:
            return None
        found = self._rows('SELECT key, "rows", total, latest FROM counts')
        return {key: (rows, total, latest) for key, rows, total, latest in found}

    def held_back(self) -> list[str]:
        """Return the partitions whose readers are still held back after a while: what stands there is not lost."""
        deadline = time.monotonic() + _ENDS_SECONDS
        readers = [KafkaReader(self._servers, topic) for topic in (PART, LETTERS)] if self._servers else []
        while True:
            held = [what for reader in readers for kind, what in reader.leftovers() if kind == "pin"]
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    def _rows(self, query: LiteralString, *values: object) -> list[Any]:
        with psycopg.connect(self._dsn) as connection:
            try:
                return connection.execute(query, values).fetchall()
            except psycopg.errors.UndefinedColumn:  # which check() adds
                return []

    def _documents(self, index: str) -> Iterator[dict[str, Any]]:
        with closing(Elasticsearch(self._urls, request_timeout=60)) as client:
            client.cluster.health(wait_for_status="yellow", timeout="60s")
            client.indices.refresh(index=index)
            yield from (hit["_source"] for hit in scan(client, index=index, request_timeout=60))

    def _topic(self) -> Iterator[Place]:
        for value in KafkaReader(self._servers, PART).values():
            yield _place(json.loads(value), PART)
        for rows in decode_rows(KafkaReader(self._servers, LETTERS).values()):
            for value in rows["json"].to_pylist():
                yield _place(json.loads(value), LETTERS)

    def _index(self) -> Iterator[Place]:
        yield from (_place(row, PART) for row in self._documents(PART))
        for letter in self._documents(LETTERS):
            yield _place(json.loads(letter["source"]), LETTERS)

    def _letters(self, sink: str) -> Counter[Place]:
        """Return the dead letters of a table."""
        kept = self._rows('SELECT "row" FROM epochsink.dead_letter WHERE sink = %s', sink)
        return Counter((row["src_part"], row["src_off"]) for (row,) in kept)


def refused(place: Place) -> bool:
    """Return whether the sinks that cannot take all rows refuse the one from this place."""
    _, offset = place
    return offset % 7 == 3 or offset % 11 == 5


def _place(row: Mapping[str, Any], target: str) -> Place:
    """Return a row's place, (-1, -1) if it is a letter and should be none, or the other way round."""
    place = row["src_part"], row["src_off"]
    return place if refused(place) == (target == LETTERS) else (-1, -1)


@dataclass
class Findings:
    """What was found wrong, by sink and kind. ``letters`` counts those that the part targets have in the end.

    ``held_back`` are the partitions whose readers are held back in the end.
    """

    wrong: Counter[tuple[str, str]]
    held_back: list[str] = field(default_factory=list)
    looks: int = 0
    letters: int = 0

    def early(self, targets: PartTargets, watch: Watch) -> None:
        """Look for rows of epochs that are not decided: what the targets hold is read before the decisions."""
        appended = targets.appended() | targets.without_key()
        keyed, counts = targets.keyed(), targets.counts()
        watch.look()
        decided = watch.decided()
        for name, rows in appended.items():
            self.wrong[name, "early"] += sum(off >= decided.get(part, 0) for part, off in rows)
            # a run that was killed leaves letters in the index until the next one has applied the epoch
            if name != "part_index":
                self.wrong[name, "doubled"] += sum(count - 1 for count in rows.values())
        for name, stored in keyed.items():
            self.wrong[name, "early"] += sum(off >= decided.get(part, 0) for part, off in stored.values())
        more = sum(rows for rows, _, _ in (counts or {}).values()) - sum(decided.values())
        self.wrong["counts", "early"] += max(0, more)
        self.looks += 1

    def final(self, targets: PartTargets, ends: Mapping[int, int]) -> None:
        """Compare everything with the source."""
        source = WORKLOAD.source(ends).to_pylist()
        places = {(row["src_part"], row["src_off"]) for row in source}
        without_key = {(part, off) for part, off in places if off % 7 == 3}
        # all of it first: whoever meets a target that cannot be read asks again, and nothing is counted twice
        self.held_back = targets.held_back()
        appended, letters = targets.appended(), targets.without_key()
        keyed, counts = targets.keyed(), targets.counts()
        self.letters = sum(
            appended[name][place] for name in PARTS & appended.keys() for place in places if refused(place)
        )
        for wanted, found in ((places, appended), (without_key, letters)):
            for name, rows in found.items():
                self.wrong[name, "lost"] += len(wanted - rows.keys())
                self.wrong[name, "unknown"] += len(rows.keys() - wanted)
                self.wrong[name, "doubled"] += sum(count - 1 for count in rows.values())
        for name, stored in keyed.items():
            # the source is in the order of versions
            newest = {row["key"]: row for row in source if name != "newest" or row["src_off"] % 7 != 3}
            expected = {key: (row["src_part"], row["src_off"]) for key, row in newest.items() if row["op"] == "U"}
            self.wrong[name, "lost"] += len(expected.keys() - stored.keys())
            self.wrong[name, "unknown"] += len(stored.keys() - expected.keys())
            self.wrong[name, "other"] += sum(stored[key] != expected[key] for key in expected.keys() & stored.keys())
        sums: dict[int, list[int]] = {}
        for row in source:
            one = sums.setdefault(row["key"], [0, 0, 0])
            one[:] = one[0] + 1, one[1] + row["src_off"], max(one[2], row["kver"])
        if counts is None:
            return
        self.wrong["counts", "other"] += sum(counts.get(key) != tuple(one) for key, one in sums.items())
        self.wrong["counts", "unknown"] += len(counts.keys() - sums.keys())

    @property
    def shown(self) -> list[str]:
        """What is wrong."""
        wrong = [f"{count} {kind} in {name}" for (name, kind), count in sorted(self.wrong.items()) if count]
        return [f"readers are held back: {what}" for what in self.held_back] + wrong
