"""Show an operator the dead letters in a topic, and retry or drop them.

Kafka cannot delete one record. So a letter stays in its topic, and a record after it, in the same partition, says that
it is settled: written or dropped. A retry is an epoch of an identity of its own, written and committed as any other.
Its transaction has rows, these records and a marker: a letter is settled if and only if its row is written, whatever is
killed.

Of two retries at once, one commits. Both use the same transactional id. Its initialisation ends what the earlier one
left open, and takes its right to commit. Only then are the letters read, up to the ends that the partitions have by
then: an earlier commit is before these ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from heapq import nlargest
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from epochsink import arrow_buffers
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import letters_identity, marker_group
from epochsink.kafka import errors, preflight
from epochsink.kafka.applied_epochs import Markers
from epochsink.kafka.commit import TransactionCommits
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.dead_letter import DROPPED, SETTLED, WRITTEN, Rules, refused, rendered, settlement
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.rendered_value import value_of
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.topic_log import TopicLog
from epochsink.kafka.transactions import Transactions
from epochsink.kafka.witness import Witness
from epochsink.kafka.writer import KafkaWriter, fill
from epochsink.sink import Chosen, Epoch, Identity, Keeping, Letter, Letters, Outcome, Retried, Task, identity_key
from epochsink.sink.letter_row import decode_rows

_TASK: Final = "0" * 32
"""The uuid of the one task of an epoch of letters."""
_AT_ONCE_BYTES: Final = 32 << 20
"""How much one epoch of a retry writes: its transaction must not stay open for long, because readers wait for it."""
_OVERHEAD_BYTES: Final = 1 << 10


class _Found(NamedTuple):
    """A letter in the topic; ``headers`` as text."""

    partition: int
    offset: int
    at_ms: int
    headers: Mapping[str, str]
    value: bytes

    @property
    def name(self) -> str:
        """The letter's id."""
        return f"{self.partition}-{self.offset}"

    @property
    def row(self) -> pa.RecordBatch | None:
        """The row, as the sink's writer got it; None if the value is something else."""
        try:
            (row,) = decode_rows([self.value])
        except (pa.ArrowInvalid, ValueError):
            return None
        return row


class KafkaLetters(Letters):
    """The letters of one sink in the topic of dead letters ``topic``, as read_committed readers see them.

    A letter's id is its partition and its offset. Every method reads the whole topic, twice.
    """

    def __init__(self, config: KafkaConfig, cluster: KafkaServer, identity: Identity, topic: str) -> None:
        # spool= would be in the transactional id, which has to be the same for all retries
        self._config = replace(config, spool=True)
        self._cluster = cluster
        self._identity = identity
        self._key = identity_key(identity)
        self._topic = topic
        self._own = letters_identity(identity)
        self._markers = Markers(cluster, identity_key(self._own), topic)
        self._group = marker_group(identity_key(self._own), 0, 0)

    def read(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        """Return the newest letters, by the time of writing."""
        return nlargest(limit, map(_letter, self._letters(chosen)), key=lambda letter: letter.set_aside_at)

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters."""
        return sum(1 for _ in self._letters(chosen))

    def caution(self) -> str:
        """Say where in the order of its key a message comes."""
        return (
            "each message comes after the newer ones of its key: a consumer that keeps the last one takes it for the "
            "newest, and so does compaction"
        )

    def retry(self, chosen: Chosen) -> Retried:
        """Write letters to the topic, in one or more transactions. Raises `PrepareFailed`, `OutcomeUnknown`."""
        kept: dict[str, str] = {}
        written = self._settle_all(chosen, WRITTEN, kept)
        return Retried(written=written, kept=len(kept), reason=next(iter(kept.values()), ""))

    def drop(self, chosen: Chosen) -> int:
        """Settle letters without writing their rows. Raises `PrepareFailed`, `OutcomeUnknown`."""
        return self._settle_all(chosen, DROPPED, {})

    # ---- the epoch

    def _settle_all(self, chosen: Chosen, how: str, kept: dict[str, str]) -> int:
        """Settle the chosen letters; return how many. ``kept`` gets the ids of those that stay, with the reason."""
        settled, more = 0, True
        while more:
            with self._explained():
                some, more = self._settle(chosen, how, kept)
            settled += some
        return settled

    def _settle(self, chosen: Chosen, how: str, kept: dict[str, str]) -> tuple[int, bool]:
        """Settle as many letters as an epoch takes; return how many, and whether there may be more."""
        rules = preflight.rules_of_letters(self._config, self._cluster) if how == WRITTEN else None
        at = Epoch(self._next(), uuid.uuid4().hex)
        task = Task(self._own, at, 0, _TASK, Keeping.NOT, settings={} if rules is None else rules.to_json())
        topic = None if rules is None else self._config.topic
        writer = KafkaWriter(self._config, task, _TASK, topic, cluster=self._cluster)
        try:
            # after the beginning: now no earlier retry can commit, and what it committed is before these ends
            if self._next([self._topic]) != at.number:
                return 0, True
            ends = TopicLog(self._cluster, self._topic).ends()
            letters, more = self._some(chosen, kept.keys(), ends)
            settled = self._fitting(letters, rules, kept) if letters and rules is not None else letters
            reach("kafka.letters.read")
            if not settled:
                return 0, more
            # first: the topic of letters has the marker
            places = arrow_buffers.numbers(np.array([letter.partition for letter in settled], dtype="i4"))
            empty = pa.RecordBatch.from_arrays([pa.nulls(len(settled)), places], names=["value", "partition"])
            writer.write_beside(self._topic, empty, [settlement(self._key, each.name, how) for each in settled])
            for rows in decode_rows(letter.value for letter in settled if how == WRITTEN):
                writer.write(rows)
            part = KafkaCommittable.from_json(writer.prepare())
        finally:
            # leaves alone what is prepared
            writer.abort()
        self._commit(at, part)
        reach("kafka.letters.committed")
        return len(settled), more

    def _next(self, settled_in: Sequence[str] | None = None) -> int:
        """Return the number of the next epoch of letters: even, so that all share an id, which one at a time holds."""
        marks = self._markers.read([self._group], self._cluster.deadline(), settled_in=settled_in)
        return max((mark.epoch + 2 for mark in marks.values()), default=0)

    def _commit(self, at: Epoch, part: KafkaCommittable) -> None:
        """Commit the transaction as that of any epoch. Raises `PrepareFailed`, `OutcomeUnknown`."""
        transactions = Transactions(self._cluster)
        # the vote: where its records are
        seen = Witness(self._cluster).look([part], (), self._cluster.deadline())
        part = seen.whole.get(0, part)
        reach("kafka.letters.written")
        commits = TransactionCommits(self._identity.sink, self._config, self._cluster, transactions, self._markers)
        [verdict] = commits.commit(at, [part], None)
        if verdict.outcome is Outcome.ABORTED:
            transactions.give_up(part.transaction)
            raise PrepareFailed(verdict.evidence)
        if verdict.outcome is Outcome.UNKNOWN:
            raise self._unknown(verdict.evidence)
        try:
            self._require_own(at)
            commits.await_whole(at, part)
        except (Unreachable, Refused, OutcomeUnknown) as failure:
            raise self._unknown(failure.message) from failure

    def _require_own(self, at: Epoch) -> None:
        """Raise `PrepareFailed` if the marker that proves the commit is another one's.

        Two that have begun one after the other have the same number if the first was fenced, and not if it committed.
        """
        for mark in self._markers.read([self._group], self._cluster.deadline()).values():
            if mark.epoch == at.number and mark.attempt != at.attempt:
                raise PrepareFailed(_ANOTHER)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of a failure before the commit what it means for the letters."""
        try:
            yield
        except PrepareFailed as failure:
            code = failure.facts.get("code")
            why = _ANOTHER if code in errors.FENCED else failure.message
            failure.message = f"dead letters in topic '{self._topic}': {why}; {_NOTHING}"
            if not failure.hint or (code is not None and not errors.is_permanent(code)):
                failure.hint = _AGAIN
            raise

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"whether rows of dead letters in topic '{self._topic}' were written is not known: {why}",
            hint=f"{_AGAIN}; of two retries or drops at once, one commits",
        )

    def _fitting(self, letters: Sequence[_Found], rules: Rules, kept: dict[str, str]) -> list[_Found]:
        """Return the letters whose rows the topic takes now; ``kept`` gets the others."""
        for letter in letters:
            if why := self._why_not(letter, rules):
                kept[letter.name] = why
        return [letter for letter in letters if letter.name not in kept]

    def _why_not(self, letter: _Found, rules: Rules) -> str:
        """Return why a letter's row cannot be written; "" if it can."""
        if (target := letter.headers["target"]) != self._config.topic:
            return f"it was for topic '{target}', and the sink writes to '{self._config.topic}' now"
        if (row := letter.row) is None:
            return "its value is not a row in Arrow: another program has written or changed it"
        if (still := refused(row, fill(row), rules)) is not None:
            return still.reasons[0]
        if value_of(row).null_count and ("key" not in row.schema.names or row.column("key").null_count):
            return "it is a delete without a key: which row it deletes is not known"
        return ""

    # ---- the topic

    def _letters(self, chosen: Chosen, ends: Mapping[int, int] | None = None) -> Iterator[_Found]:
        """Yield the chosen letters that are not settled; up to ``ends``, or up to the last stable offsets."""
        settled = {record.headers["letter"] for record in self._ours(ends) if SETTLED in record.headers}
        for record in self._ours(ends):
            if "error" not in record.headers or record.name in settled:
                continue
            if (not chosen.ids or record.name in chosen.ids) and chosen.epoch in {None, int(record.headers["epoch"])}:
                yield record

    def _some(self, chosen: Chosen, without: Collection[str], ends: Mapping[int, int]) -> tuple[list[_Found], bool]:
        """Return the first of the chosen letters, and whether there may be more."""
        some, size = list[_Found](), 0
        for letter in self._letters(chosen, ends):
            if letter.name in without:
                continue
            some.append(letter)
            size += len(letter.value) + _OVERHEAD_BYTES
            if size >= _AT_ONCE_BYTES:
                return some, True
        return some, False

    def _ours(self, ends: Mapping[int, int] | None) -> Iterator[_Found]:
        # several sinks, and other programs, may write to the topic
        for record in self._cluster.committed_records(self._topic, ends):
            headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
            if headers.get("key") == self._key:
                yield _Found(record.partition, record.offset, record.at_ms, headers, record.value)


_NOTHING: Final = "this transaction writes nothing, and its letters stay"
_ANOTHER: Final = "another retry or drop has begun since"
_AGAIN: Final = "type it again: what is done is not done twice"


def _letter(record: _Found) -> Letter:
    at = datetime.fromtimestamp(record.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    row = None if record.row is None else rendered(record.row)
    return Letter(record.name, int(record.headers["epoch"]), "", record.headers["error"], row, at)
