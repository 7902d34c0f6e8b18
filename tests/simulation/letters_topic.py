"""A topic and its topic of dead letters in memory, on which the production `KafkaLetters` runs step by step.

Commands at the letters (retry, drop) and the query's transaction are threads. A plan says how many steps each makes
before the next one goes on, and which command is killed.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock

import pyarrow as pa
from confluent_kafka import KafkaError
from greenlet import getcurrent

from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.kafka import Kafka, committed_records, letters
from epochsink.kafka.committable import Transaction
from epochsink.kafka.dead_letter import SETTLED, WRITTEN
from epochsink.kafka.letters import KafkaLetters
from epochsink.kafka.server import KafkaServer, Topic
from epochsink.sink import Chosen, Identity, identity_key
from epochsink.sink.letter_row import decode_rows, encode_row
from simulation.kafka_brokers import TOPIC_ID, At, Batch, Brokers, Log
from simulation.kafka_server import SETTINGS, MemoryKafka, MemoryProducer, SimulatedClock
from simulation.threads import Operation, Thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

TOPIC: Final = "t"
ASIDE: Final = "t.dead_letter"
SINK: Final = Kafka(bootstrap_servers="localhost:1", topic=TOPIC, on_rejected="dead_letter", timeout=8)
IDENTITY: Final = Identity("query", "topic", 1)
QUERY: Final = "query"
LETTERS: Final = ("a", "b")


class Record(NamedTuple):
    """A record; its bytes are characters."""

    value: str | None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class LetterBrokers(Brokers):
    """Brokers with two topics of one partition each."""

    readers: Any = field(default_factory=mock.Mock)
    logs: dict[At, Log] = field(default_factory=lambda: {(topic, 0): Log() for topic in (TOPIC, ASIDE)})
    producers: dict[At, Any] = field(default_factory=lambda: {(topic, 0): {} for topic in (TOPIC, ASIDE)})
    clock: float = 0.0
    """That of the client which reads committed records."""
    fault: str = ""
    """What becomes of the next EndTxn: "lost" is its answer, "unsent" itself; also as it is repeated."""
    faulty: Transaction | None = None

    def _keep_order(self, at: At, batches: Sequence[Batch]) -> None:
        """Look at no order: letters have none."""

    def send(self, producer: Transaction, topic: str, records: Iterable[Record]) -> None:
        """Append records under an open transaction, as the query does."""
        self.add(*producer, [(topic, 0)])
        rows: Any = tuple(records)
        self.append((topic, 0), producer.transactional_id, Batch(0, *producer.producer, 0, rows))

    def begin(self) -> Transaction:
        """Begin a transaction of the query."""
        _, *producer = self.initialise(QUERY)
        return Transaction(QUERY, *producer)

    def finish_query(self, transaction: Transaction, *, commits: bool) -> None:
        """End the query's transaction, to the last partition."""
        self.end(*transaction, commit=commits)
        self.finish()

    def stable(self, topic: str) -> int:
        """Return the last stable offset: that of the first record whose transaction has not ended."""
        opened = [each.start for each in self.producers[topic, 0].values() if each.start >= 0]
        return min(opened, default=self.logs[topic, 0].end)

    def visible(self, topic: str, start: int = 0) -> list[tuple[int, Record]]:
        """Return the committed records from an offset on that readers see."""
        log, stable = self.logs[topic, 0].batches, self.stable(topic)
        found = []
        for number, batch in enumerate(log):
            ends = (later.end for later in log[number:] if later.end and later.producer_id == batch.producer_id)
            if batch.rows and next(ends, "") == "commit":
                found += [(batch.base + place, record) for place, record in enumerate(batch.rows)]
        return [(at, record) for at, record in found if start <= at < stable]  # type: ignore[misc] # not `Row`


def letter(name: str) -> Record:
    """Return a letter of the sink."""
    told = {"key": identity_key(IDENTITY), "error": "too large", "epoch": "0", "target": TOPIC}
    value = encode_row(pa.record_batch({"key": pa.array(["k"]), "value": pa.array([name])}))
    return Record(value.decode("latin-1"), tuple(told.items()))


def step(name: str, apply: Callable[[], Any], *, reads: bool = False) -> Any:
    """Make one step of the thread that runs; at once if none does."""
    parent: Any = getcurrent().parent
    return apply() if parent is None else parent.switch(Operation(name, apply, reads))


class LettersKafka(MemoryKafka):
    """A command's connection."""

    def __init__(self, brokers: LetterBrokers) -> None:
        KafkaServer.__init__(self, SINK.bootstrap_servers, SINK.timeout, SimulatedClock())
        self._brokers: LetterBrokers = brokers
        self._step = step

    def ask_topic_settings(self, topic: str) -> Mapping[str, str]:
        return SETTINGS

    def topics_known(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: Topic(TOPIC_ID, {0: 1}) for name in names}

    def committed_records(self, topic: str, ends: Mapping[int, int] | None) -> Iterator[Any]:
        return committed_records.committed_records(self.servers, {}, self.timeout, topic, ends)

    def producer(self, options: Mapping[str, str], transactional_id: str, transaction_timeout_ms: int) -> Any:
        return LettersProducer(self, self._brokers, transactional_id)

    def end_transaction(self, transaction: Transaction, *, commit: bool) -> int:
        brokers = self._brokers
        if commit and brokers.fault and brokers.faulty is None:
            brokers.faulty = transaction
        if brokers.faulty != transaction or not brokers.fault:
            return super().end_transaction(transaction, commit=commit)
        if brokers.fault == "lost":
            super().end_transaction(transaction, commit=commit)
        raise OSError("no answer")


class LettersProducer(MemoryProducer):
    """Sends what was queued at its flush."""

    _queue: dict[At, Any]

    def produce(self, topic: str, messages: Any) -> None:
        self.produce_each(topic, messages, None, None)

    def produce_each(self, topic: str, messages: Any, headers: Any, _timestamps: object) -> None:
        for (_, _, _, payload, size, *_), told in zip(messages.tolist(), headers or repeat(None), strict=False):
            value = ctypes.string_at(payload, size).decode("latin-1") if payload else None
            named = tuple((each["key"].decode(), each["value"].decode()) for each in told or ())
            self._queue.setdefault((topic, 0), []).append(Record(value, named))


class Consumer:
    """Reads committed records; says at each last stable offset that the partition ends there."""

    def __init__(self, broker: LetterBrokers, _settings: object, logger: object) -> None:
        self._broker = broker
        self._at = 0
        self._told = -1
        self._fetched: list[Any] = []

    def list_topics(self, topic: str, timeout: float) -> Any:
        return mock.Mock(topics={topic: mock.Mock(partitions={0: None})})

    def assign(self, _partitions: object) -> None:
        pass

    def close(self) -> None:
        pass

    def poll(self, seconds: float) -> Any:
        if not self._fetched:
            step("fetch", self._fetch)
        if not self._fetched:
            self._broker.clock += seconds
            return None
        return self._fetched.pop(0)

    def _fetch(self) -> None:
        self._fetched = [_Message(at, record) for at, record in self._broker.visible(ASIDE, self._at)]
        self._at = max(self._at, self._broker.stable(ASIDE))
        if self._at != self._told:
            self._told = self._at
            self._fetched.append(_Message(self._at, None))


class _Message:
    def __init__(self, at: int, record: Record | None) -> None:
        self._at = at
        self._record = record

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._at

    def error(self) -> Any:
        return mock.Mock(code=lambda: KafkaError._PARTITION_EOF) if self._record is None else None

    def headers(self) -> Any:
        return self._record and [(name, told.encode()) for name, told in self._record.headers]

    def value(self) -> Any:
        return self._record and (self._record.value or "").encode("latin-1")

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


def clock_of(broker: LetterBrokers) -> Any:
    """Return what stands for the module `time` of the client which reads committed records."""
    return mock.Mock(monotonic=lambda: broker.clock)


@dataclass(frozen=True)
class Plan:
    """One command makes ``first`` steps; the query's transaction with a letter begins; the other makes ``second``.

    Then the first one is killed, or both go on, and the next EndTxn meets a fault; the query's transaction ends
    ``before`` or after the commands.
    """

    first: int
    second: int
    fault: str
    before: bool
    commits: bool
    drops: bool


def play(plan: Plan, kind: type[KafkaLetters] = KafkaLetters, **patched: Any) -> list[str]:
    """Play a plan, then retry all letters that are left; return what is wrong in the end."""
    broker = LetterBrokers()
    before = broker.begin()
    broker.send(before, ASIDE, map(letter, LETTERS))
    broker.finish_query(before, commits=True)
    counted: list[int] = []
    raised: list[BaseException | None] = []

    def command(*, drops: bool, moved: bool = False) -> None:
        # the same letters, typed with other options, for a checkpoint whose folder has another name
        config = replace(SINK, spool=False) if moved else SINK
        identity = replace(IDENTITY, pipeline="moved") if moved else IDENTITY
        found = kind(config, LettersKafka(broker), identity, ASIDE)
        counted.append(found.drop(Chosen()) if drops else found.retry(Chosen()).written)

    with ExitStack() as stack:
        for name, each in patched.items():
            stack.enter_context(mock.patch.object(letters, name, each))
        for name, each in {"Consumer": partial(Consumer, broker), "time": clock_of(broker)}.items():
            stack.enter_context(mock.patch.object(committed_records, name, each))
        one = Thread("one", partial(command, drops=False), raised.append)
        other = Thread("other", partial(command, drops=plan.drops, moved=True), raised.append)
        run(one, plan.first)
        late = broker.begin()
        broker.send(late, ASIDE, [letter("late")])
        run(other, plan.second)
        if plan.fault == "killed":
            one.kill()
        else:
            broker.fault = plan.fault
        if plan.before:
            broker.finish_query(late, commits=plan.commits)
        run(other)
        run(one)
        if not plan.before:
            broker.finish_query(late, commits=plan.commits)
        broker.fault = ""
        try:
            command(drops=False)
        except PrepareFailed as stuck:
            return [f"a retry after all that is stuck: {stuck}"]
    broker.finish()
    told = (PrepareFailed, OutcomeUnknown, type(None))
    wrong = [repr(error) for error in raised if not isinstance(error, told)]
    wrong += wrong_letters(broker, [*LETTERS, *(["late"] if plan.commits else [])])
    settled = sum(SETTLED in dict(record.headers) for _, record in broker.visible(ASIDE))
    if plan.fault != "killed" and not any(isinstance(error, OutcomeUnknown) for error in raised):
        wrong += [f"{counted} are reported, and {settled} settled"] if sum(counted) != settled else []
    return wrong


def run(thread: Thread, steps: int = 1000) -> None:
    """Let a thread make steps, to its end at most."""
    while thread.request is not None and steps:
        if isinstance(thread.request, Operation):
            steps -= 1
            thread.resume(thread.request.apply())
        else:
            thread.resume(None)


def wrong_letters(broker: LetterBrokers, expected: Sequence[str]) -> list[str]:
    """Return which letters are not settled once, or whose rows are not in the topic as often as they say."""
    rows_of = {f"0-{at}": (record.value or "").encode("latin-1") for at, record in _letters(broker)}
    names = {name: next(decode_rows([row]))["value"][0].as_py() for name, row in rows_of.items()}
    settled = Counter(
        (names[told["letter"]], told[SETTLED])
        for _, record in broker.visible(ASIDE)
        if SETTLED in (told := dict(record.headers))
    )
    rows = Counter(record.value or "" for _, record in broker.visible(TOPIC))
    found = [
        f"{name} has {rows[name]} rows, and is settled by {settled}"
        for name in expected
        if not _once(name, settled, rows)
    ]
    return found + [f"{name} is unknown" for name in rows.keys() - set(expected)]


def _letters(broker: LetterBrokers) -> Iterator[tuple[int, Record]]:
    return (found for found in broker.visible(ASIDE) if "error" in dict(found[1].headers))


def _once(name: str, settled: Mapping[tuple[str, str], int], rows: Mapping[str, int]) -> bool:
    how = [kind for (of, kind), count in settled.items() for _ in range(count) if of == name]
    return len(how) == 1 and rows.get(name, 0) == (how[0] == WRITTEN)
