"""What production asks of a Kafka cluster, over the brokers in memory: each request is a step."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from kafka.errors import for_code

from epochsink.kafka.committable import Producer, Transaction
from epochsink.kafka.committed_records import CommittedRecord
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.server import (
    Append,
    Description,
    End,
    EpochEnds,
    GroupOffset,
    GroupOffsets,
    KafkaServer,
    LeaderRequest,
    ListedTransaction,
    Offsets,
    Partition,
    Producers,
    Question,
    Records,
    Topic,
    TransactionEnds,
    TransactionState,
    raise_for,
)
from simulation.kafka_brokers import (
    CONCURRENT,
    INVALID_PRODUCER_EPOCH,
    LETTER,
    OFFSETS_AT,
    OK,
    PARTITIONS,
    TOPIC,
    TOPIC_ID,
    Batch,
    Brokers,
    decoded,
)
from simulation.readers import Row
from simulation.steps import Answer, Stepper
from simulation.world import World

SETTINGS: Final = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "-1",
    "unclean.leader.election.enable": "false",
}
BROKER: Final = {"transaction.max.timeout.ms": "900000", "offsets.retention.minutes": "10080"}
LONG_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 8.0
_FENCED: Final = -144


class SimulatedClock:
    """Time passes by waiting, and each wait is a long one: time-outs come after few looks."""

    def __init__(self) -> None:
        self._now = 1e9

    def time(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float, /) -> None:
        self._now += max(LONG_SECONDS, seconds)


class MemoryKafka(KafkaServer):
    """A driver's connection to the cluster of a world."""

    def __init__(self, world: World, step: Stepper) -> None:
        super().__init__("memory:9092", TIMEOUT_SECONDS, SimulatedClock())
        self._brokers: Brokers = world.brokers
        self._step = world.copying(LETTER, step)
        self._is_turned = False
        self._looked_after = 0

    def beside(self, *questions: Callable[[], Any]) -> list[Any]:
        """Ask them one after another, from the first one or, every other time, from the last one."""
        self._is_turned = not self._is_turned
        if self._is_turned:
            return [question() for question in reversed(questions)][::-1]
        return super().beside(*questions)

    def step(self, name: str, request: Callable[[], Answer], *, reads: bool = False) -> Answer:
        """Make a request; the brokers go on with what is decided."""

        def carry_out() -> Answer:
            self._brokers.write_ends()
            return request()

        return self._step(f"{LETTER} {name}", carry_out, reads=reads)

    def end_transaction(self, transaction: Transaction, *, commit: bool) -> int:
        what = "commit" if commit else "abort"
        return self.step(what, lambda: self._brokers.end(*transaction, commit=commit))

    def commit_transactions(self, transactions: Sequence[Transaction]) -> dict[str, int]:
        return {each.transactional_id: self.end_transaction(each, commit=True) for each in transactions}

    def fence_producers(self, transactions: Collection[Transaction]) -> dict[str, int]:
        def request() -> dict[str, int]:
            return {each.transactional_id: self._initialise(each) for each in transactions}

        return self.step("fence off", request)

    def _initialise(self, had: Transaction) -> int:
        is_known = self._looked_after == self._brokers.set_backs
        return self._brokers.initialise(had.transactional_id, had.producer, is_known=is_known)[0]

    def initialise_producer(self, transactional_id: str) -> Producer:
        code, *producer = self.step("initialise", lambda: self._brokers.initialise(transactional_id))
        raise_for(code, transactional_id)
        return Producer(*producer)

    def describe_transactions(self, ids: Sequence[str]) -> dict[str, Description]:
        def request() -> dict[str, Description]:
            self._looked_after = self._brokers.set_backs
            return {name: self._brokers.describe(name) for name in ids}

        return self.step("describe", request, reads=True)

    def list_transactions(
        self, states: Sequence[TransactionState], producer_ids: Collection[int]
    ) -> list[ListedTransaction]:
        def request() -> list[ListedTransaction]:
            return [
                ListedTransaction(name, each.producer_id)
                for name, each in self._brokers.ids.items()
                if (not states or each.state in states) and (not producer_ids or each.producer_id in producer_ids)
            ]

        return self.step("list", request, reads=True)

    def add_partitions(self, transaction: Transaction, topic: str, partitions: Collection[int]) -> None:
        places = [(topic, number) for number in partitions]
        raise_for(self.step("add partitions", lambda: self._brokers.add(*transaction, places)), "adding")

    def list_groups(self) -> list[str]:
        return self.step("list groups", lambda: list(self._brokers.markers), reads=True)

    def group_offsets(
        self, groups: Sequence[str], topics: Collection[str] | None, *, stable: bool
    ) -> list[GroupOffsets]:
        return self.step(
            "markers", lambda: [self._brokers.offsets(group, topics, stable=stable) for group in groups], reads=True
        )

    def ask_broker_setting(self, name: str) -> str | None:
        return BROKER[name]

    def ask_topic_settings(self, topic: str) -> Mapping[str, str]:
        return SETTINGS if topic == TOPIC else {}

    def topics_known(self, names: Iterable[str]) -> dict[str, Topic]:
        topics = {TOPIC: Topic(TOPIC_ID, dict.fromkeys(range(PARTITIONS), 1)), OFFSETS_AT[0]: Topic("e" * 32, {0: 1})}
        return {name: topics[name] for name in names if name in topics}

    def topics_and(
        self, names: Iterable[str], requests: Sequence[LeaderRequest]
    ) -> tuple[dict[str, Topic], list[dict[Partition, Any]]]:
        return self.topics_known(names), self.ask_leaders(requests)

    def ask_leaders(self, requests: Sequence[LeaderRequest]) -> list[dict[Partition, Any]]:
        if not requests:
            return []
        reads = not any(isinstance(each.question, (Append, TransactionEnds)) for each in requests)
        kinds = ", ".join(type(each.question).__name__ for each in requests)

        def ask() -> list[dict[Partition, Any]]:
            return [{at: self._answer(each.question, at) for at in each.partitions} for each in requests]

        answers = self.step(f"leaders {kinds}", ask, reads=reads)
        for each, answer in zip(requests, answers, strict=True):
            self._look_at(each.question, answer)
        return answers

    def _answer(self, question: Question, at: Partition) -> Any:
        brokers = self._brokers
        match question:
            case Producers():
                return brokers.producers_at(at)
            case TransactionEnds():
                return brokers.write_markers(at, question.producers[at], commits=question.are_commits)
        log = brokers.logs[at]
        match question:
            case Offsets():
                return End(log.start if question.are_first else log.end, len(log.epochs) - 1)
            case EpochEnds():
                return brokers.epoch_end(at, question.leader_epochs[at])
            case Records():
                return brokers.fetch(at, question.positions[at], question.bytes_each)
            case Append():
                return brokers.append(at, question.transaction.transactional_id, decoded(question.batch))

    def _look_at(self, question: Question, answer: dict[Partition, Any]) -> None:
        """Wait as long as brokers wait for records, and raise errors."""
        if isinstance(question, Records) and not any(each.records for each in answer.values()):
            self.clock.sleep(question.wait_ms / 1000)
        if isinstance(question, Append):
            for at, (code, offset) in answer.items():
                raise_for(code, f"{at}")
                answer[at] = offset
        if isinstance(question, TransactionEnds):
            for at, code in answer.items():
                raise_for(code if code != INVALID_PRODUCER_EPOCH else 0, f"{at}")

    def look_again(self) -> None:
        """Remember nothing."""

    def version(self) -> str:
        return "4.1"

    def describes_transactions(self) -> bool:
        return True

    def describe_topic(self, topic: str) -> dict[str, Any]:
        raise NotImplementedError

    def create_topic(self, topic: str, how: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def committed_records(self, topic: str, ends: Mapping[int, int] | None) -> Iterator[CommittedRecord]:
        raise NotImplementedError

    def producer(self, options: Mapping[str, str], transactional_id: str, transaction_timeout_ms: int) -> Any:
        del options, transaction_timeout_ms
        return MemoryProducer(self, self._brokers, transactional_id)

    def close(self) -> None:
        """Nothing is connected."""


@lru_cache(4096)
def row_of(value: bytes) -> Row:
    """Return the row of a message."""
    return Row(*json.loads(value))


class MemoryProducer:
    """Produces rows, which it puts into partitions by their number."""

    def __init__(self, server: MemoryKafka, brokers: Brokers, transactional_id: str) -> None:
        self._server = server
        self._brokers = brokers
        self.transactional_id = transactional_id
        self._producer = (-1, -1)
        self._queue: dict[Partition, list[Row]] = {}
        self._sent: dict[Partition, int] = {}
        self._is_released = False

    def begin(self) -> None:
        code = CONCURRENT
        while code == CONCURRENT:
            code, *producer = self._server.step("begin", lambda: self._brokers.initialise(self.transactional_id))
        self._producer = (producer[0], producer[1])

    def topic_id(self, topic: str) -> str:
        del topic
        return TOPIC_ID

    def produce(self, topic: str, messages: Any) -> None:
        for _, _, partition, payload, size, *_ in messages.tolist():
            row = row_of(ctypes.string_at(payload, size))
            self._queue.setdefault((topic, partition), []).append(row)

    def flush(self) -> None:
        if not self._queue:
            return
        queue, self._queue = self._queue, {}
        name, (producer_id, epoch) = self.transactional_id, self._producer
        batches = {}
        for at, rows in queue.items():
            first = self._sent.get(at, 0)
            self._sent[at] = first + len(rows)
            batches[at] = Batch(0, producer_id, epoch, first, tuple(rows))

        def send() -> int:
            code = self._brokers.add(name, producer_id, epoch, list(batches))
            codes = [self._brokers.append(at, name, batch)[0] for at, batch in batches.items()] if not code else []
            return code or max(codes)

        self._check(self._server.step("send", send))

    def mark(self, group: str, topic: str, offset: int, metadata: str = "") -> None:
        kept = GroupOffset(offset, metadata, OK)
        ours = Transaction(self.transactional_id, *self._producer)
        self._check(self._server.step("mark", lambda: self._brokers.add_offset(ours, group, topic, kept)))

    def identity(self) -> tuple[int, int]:
        return self._producer

    def release(self) -> None:
        self._is_released = True

    def abort(self) -> None:
        if not self._is_released:
            self._is_released = True
            name, (producer_id, epoch) = self.transactional_id, self._producer
            self._check(
                self._server.step("abort own", lambda: self._brokers.end(name, producer_id, epoch, commit=False))
            )

    def _check(self, code: int) -> None:
        if code:
            raise NativeError(_FENCED, for_code(code).__name__)
