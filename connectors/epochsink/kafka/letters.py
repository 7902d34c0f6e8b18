"""Show an operator the dead letters in a topic, and retry or drop them.

Kafka cannot delete one record. So a letter stays in its topic, and a record after it, in the same partition, says that
it is settled: written or dropped. A retry writes rows and these records in one transaction: a letter is settled if and
only if its row is written, whatever is killed.

Of two retries at once, one commits. Both use the same transactional id. Its initialisation ends what the earlier one
left open, and takes its right to commit. Only then are the letters read, up to the ends that the partitions have by
then: an earlier commit is before these ends.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from epochsink import arrow_buffers
from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import identity_key, letters_id
from epochsink.kafka import errors, preflight
from epochsink.kafka.client_options import BATCH_BYTES, TRANSLATION
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.dead_letter import DROPPED, SETTLED, WRITTEN, refused, rows_of, settlement
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.producer import TransactionalProducer
from epochsink.kafka.topic_log import TopicLog
from epochsink.kafka.transactions import ENDING, Answer, Transactions
from epochsink.kafka.witness import Witness
from epochsink.kafka.writer import fill
from epochsink.sink import Letter, Letters, Retried

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.config import KafkaConfig
    from epochsink.kafka.dead_letter import Rules
    from epochsink.sink import Chosen, Identity

_POLL_SECONDS: Final = 0.5
_LOOK_AGAIN_SECONDS: Final = 0.02
_AT_ONCE_BYTES: Final = 32 << 20
"""How much one transaction of a retry writes: it must not stay open for long, because readers wait for it."""
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


class KafkaLetters(Letters):
    """The letters of one sink in the topic of dead letters ``topic``, as read_committed readers see them.

    A letter's id is its partition and its offset. Every method reads the whole topic, twice.
    """

    def __init__(self, config: KafkaConfig, cluster: Cluster, identity: Identity, topic: str) -> None:
        self._config = config
        self._cluster = cluster
        self._identity = identity
        self._key = identity_key(identity)
        self._topic = topic
        self._transactions = Transactions(cluster)

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

    # ---- the transaction

    def _settle_all(self, chosen: Chosen, how: str, kept: dict[str, str]) -> int:
        """Settle the chosen letters; return how many. ``kept`` gets the ids of those that stay, with the reason."""
        settled, more = 0, True
        while more:
            some, more = self._settle(chosen, how, kept)
            settled += some
        return settled

    def _settle(self, chosen: Chosen, how: str, kept: dict[str, str]) -> tuple[int, bool]:
        """Settle as many letters as a transaction takes; return how many, and whether there may be more."""
        rules = preflight.rules_of_letters(self._config, self._cluster) if how == WRITTEN else None
        with self._begun(rules) as producer:
            # after the beginning: now no earlier retry can commit, and what it committed is before these ends
            ends = TopicLog(self._cluster, self._topic).ends()
            found, more = self._some(chosen, kept.keys(), ends)
            settled = self._fitting(found, rules, kept) if found and rules is not None else found
            reach("kafka.letters.read")
            if not settled:
                producer.abort()
                return 0, more
            topics = self._produced(producer, settled, how)
            producer.flush()
            transaction = Transaction(producer.transactional_id, *producer.identity())
            producer.release()
        rows = len(settled) * (2 if how == WRITTEN else 1)
        self._commit(
            KafkaCommittable(
                transaction=transaction, partition=0, task="", rows=rows, prepared_at=int(time.time()), topics=topics
            )
        )
        reach("kafka.letters.committed")
        return len(settled), more

    @contextmanager
    def _begun(self, rules: Rules | None) -> Iterator[TransactionalProducer]:
        options = self._config.options if rules is None else rules.options(self._config.options, BATCH_BYTES)
        timeout_ms = self._config.transaction_timeout_ms(self._identity)
        try:
            producer = TransactionalProducer(
                options, letters_id(self._key), timeout_ms, self._config.timeout, self._config.bootstrap_servers
            )
            try:
                producer.begin()
                yield producer
            except BaseException:
                with suppress(NativeError):  # then the next retry aborts it, or the brokers
                    producer.abort()
                raise
        except NativeError as failure:
            why = "another retry or drop has begun since" if failure.code in errors.FENCED else failure.text
            hint = errors.hint(failure.code) if errors.is_permanent(failure.code) else _AGAIN
            raise PrepareFailed(f"dead letters in topic '{self._topic}': {why}; {_NOTHING}", hint=hint) from failure

    def _fitting(self, found: Sequence[_Found], rules: Rules, kept: dict[str, str]) -> list[_Found]:
        """Return the letters whose rows the topic takes now; ``kept`` gets the others."""
        rows, _ = rows_of([letter.value for letter in found])
        still = refused(rows, fill(rows), rules)
        if still is not None:
            kept |= {found[row].name: why for row, why in zip(still.rows.tolist(), still.reasons, strict=True)}
        for letter, key, value in zip(found, rows["key"], rows["value"], strict=True):
            if (target := letter.headers["target"]) != self._config.topic:
                kept[letter.name] = f"it was for topic '{target}', and the sink writes to '{self._config.topic}' now"
            elif not (key.is_valid or value.is_valid):
                kept[letter.name] = "it is a delete without a key: which row it deletes is not known"
        return [letter for letter in found if letter.name not in kept]

    def _produced(self, producer: TransactionalProducer, settled: Sequence[_Found], how: str) -> dict[str, str]:
        """Produce rows and settlements; return the ids of the topics, which are read before the first record."""
        topics = {self._topic: producer.topic_id(self._topic)}
        if how == WRITTEN:
            target = str(self._config.topic)
            topics[target] = producer.topic_id(target)
            rows, timestamps = rows_of([letter.value for letter in settled])
            producer.produce_each(target, fill(rows), rows["headers"].to_pylist(), timestamps)
        places = arrow_buffers.numbers(np.array([letter.partition for letter in settled], dtype="i4"))
        empty = pa.RecordBatch.from_arrays([pa.nulls(len(settled)), places], names=["value", "partition"])
        headers = [settlement(self._key, letter.name, how) for letter in settled]
        producer.produce_each(self._topic, fill(empty), headers, None)
        return topics

    def _commit(self, part: KafkaCommittable) -> None:
        """Commit the transaction, and look for its records before that and after. Raises `OutcomeUnknown`."""
        witness, deadline, name = Witness(self._cluster), self._cluster.deadline(), part.transaction.transactional_id
        try:
            # EndTxn takes no condition: it is answered well even if a partition has lost the records
            seen = witness.look([part], (), deadline)
            if not seen.whole:
                why = seen.missing.get(0, f"topic(s) {', '.join(part.topics)} were deleted")
                raise PrepareFailed(f"{why}; {_NOTHING}", hint=_AGAIN)
        except BaseException:
            self._transactions.give_up(part.transaction)
            raise
        reach("kafka.letters.written")
        try:
            answer, told = self._transactions.end(part.transaction, deadline, commit=True)
            if answer is not Answer.DECIDED:
                raise self._unknown(f"the coordinator answers {told}")
            while self._transactions.describe([name], deadline)[name].state in ENDING:
                if time.monotonic() >= deadline:
                    raise self._unknown("its commit is decided, and readers do not see it yet")
                time.sleep(_LOOK_AGAIN_SECONDS)
            loss = witness.lost([seen.whole[0]], {part.transaction: seen.ends}, deadline, ended=True)
        except (Unreachable, Refused) as failure:
            raise self._unknown(failure.message) from failure
        if loss.words:
            raise self._unknown(loss.words)

    def _unknown(self, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"whether rows of dead letters in topic '{self._topic}' were written is not known: {why}",
            hint=f"{_AGAIN}; of two retries or drops at once, one commits",
        )

    # ---- the topic

    def _letters(self, chosen: Chosen, ends: Mapping[int, int] | None = None) -> Iterator[_Found]:
        """Yield the chosen letters that are not settled; up to ``ends``, or up to the last stable offsets."""
        settled = {found.headers["letter"] for found in self._ours(ends) if SETTLED in found.headers}
        for found in self._ours(ends):
            if "error" not in found.headers or found.name in settled:
                continue
            if (not chosen.ids or found.name in chosen.ids) and chosen.epoch in {None, int(found.headers["epoch"])}:
                yield found

    def _some(self, chosen: Chosen, without: Collection[str], ends: Mapping[int, int]) -> tuple[list[_Found], bool]:
        """Return the first of the chosen letters, and whether there may be more."""
        some, size = list[_Found](), 0
        for found in self._letters(chosen, ends):
            if found.name in without:
                continue
            some.append(found)
            size += len(found.value) + _OVERHEAD_BYTES
            if size >= _AT_ONCE_BYTES:
                return some, True
        return some, False

    def _ours(self, ends: Mapping[int, int] | None) -> Iterator[_Found]:
        # several sinks, and other programs, may write to the topic
        for message in self._messages(ends):
            headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers() or ()}
            if headers.get("key") == self._key:
                at = message.timestamp()[1]
                yield _Found(message.partition(), message.offset(), at, headers, message.value() or b"")

    def _messages(self, ends: Mapping[int, int] | None) -> Iterator[Any]:
        """Yield the committed records of all partitions. Raises `Unreachable`.

        Up to ``ends``, even if transactions that are open now have to end first; without it, up to where they begin.
        """
        connection = {name: value for name, value in self._config.options.items() if name in TRANSLATION}
        reading = {
            "bootstrap.servers": self._config.bootstrap_servers,
            # without a group that the brokers would know: nothing is committed
            "group.id": f"epochsink.letters.{uuid.uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # so long would the broker keep an answer back that says "the end"
            "fetch.wait.max.ms": 20,
            "auto.offset.reset": "earliest",
        }
        consumer = Consumer(connection | reading)
        try:
            known = consumer.list_topics(self._topic, timeout=self._config.timeout).topics[self._topic].partitions
            consumer.assign([TopicPartition(self._topic, partition, OFFSET_BEGINNING) for partition in known])
            waiting, arrived = set(known), time.monotonic()
            while waiting:
                message: Any = consumer.poll(_POLL_SECONDS)
                if message is None:
                    if time.monotonic() - arrived > self._config.timeout:
                        raise self._unreachable("no record came" if ends is None else _OPEN)
                    continue
                arrived, error = time.monotonic(), message.error()
                end = None if ends is None else ends.get(message.partition(), 0)
                if error is None:
                    if end is None or message.offset() < end:
                        yield message
                    if end is not None and message.offset() + 1 >= end:
                        waiting.discard(message.partition())
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name of it
                    # before the end: a transaction is open there
                    if end is None or message.offset() >= end:
                        waiting.discard(message.partition())
                elif not error.retriable():
                    raise self._unreachable(error.str())
        finally:
            consumer.close()

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(
            f"topic '{self._topic}' of {self._config.bootstrap_servers} could not be read: {why}",
            hint="type it again; check that all brokers run, and that the user may READ the topic",
        )


_OPEN: Final = "a transaction that is open there hides whether letters were written already"
_NOTHING: Final = "this transaction writes nothing, and its letters stay"
_AGAIN: Final = "type it again: what is done is not done twice"


def _letter(found: _Found) -> Letter:
    at = datetime.fromtimestamp(found.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    epoch, row = int(found.headers["epoch"]), json.loads(found.value)
    return Letter(found.name, epoch, "", found.headers["error"], row, at)
