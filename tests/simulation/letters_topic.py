"""A topic and its topic of dead letters in memory, on which the production `KafkaLetters` runs step by step.

Commands at the letters (retry, drop) and the query's transaction are threads. A plan says how many steps each makes
before the next one goes on, and which command is killed.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from confluent_kafka import KafkaError
from greenlet import getcurrent

from epochsink.errors import OutcomeUnknown, PrepareFailed
from epochsink.identity import identity_key
from epochsink.kafka import Kafka, letters
from epochsink.kafka.dead_letter import SETTLED, WRITTEN, Rules
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.letters import KafkaLetters
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.transactions import Answer, Description, State
from epochsink.kafka.witness import Loss, Seen
from epochsink.sink import Chosen, Identity
from simulation.threads import Operation, Thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from epochsink.kafka.committable import KafkaCommittable, Transaction

TOPIC: Final = "t"
ASIDE: Final = "t.dead_letter"
SINK: Final = Kafka(bootstrap_servers="localhost:1", topic=TOPIC, on_rejected="dead_letter", timeout=20)
IDENTITY: Final = Identity("query", "topic", 1)
RULES: Final = Rules(ASIDE, 1 << 20, 1 << 20, 1 << 20, needs_key=False)
FENCED: Final = -144
QUERY: Final = "query"
LETTERS: Final = ("a", "b")


@dataclass(frozen=True)
class Record:
    """A record, or, with ``end``, the mark of a transaction's end. ``by`` is the transaction."""

    by: tuple[str, int]
    value: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    end: str = ""


@dataclass
class Id:
    """A transactional id at the coordinator: the producer epoch, and the state of its transaction."""

    epoch: int = 0
    state: State = State.EMPTY


@dataclass
class Broker:
    """Two topics of one partition each, and the coordinator."""

    logs: dict[str, list[Record]] = field(default_factory=lambda: {TOPIC: [], ASIDE: []})
    ids: dict[str, Id] = field(default_factory=dict)
    clock: float = 0.0
    fault: str = ""
    """What becomes of the next EndTxn: "lost" is its answer, "unsent" itself."""

    def initialise(self, name: str) -> int:
        """Abort what is open under an id, finish what is decided; return its next producer epoch."""
        found = self.ids.setdefault(name, Id())
        if found.state is State.ONGOING:
            found.state = State.PREPARE_ABORT
        self.complete(name)
        found.epoch, found.state = found.epoch + 1, State.EMPTY
        return found.epoch

    def send(self, name: str, epoch: int, records: Sequence[tuple[str, Record]]) -> None:
        """Append records to the open transaction of a producer. Raises `NativeError` if it is fenced."""
        found = self.ids[name]
        if found.epoch != epoch:
            raise NativeError(FENCED, "fenced")
        found.state = State.ONGOING
        for topic, record in records:
            self.logs[topic].append(record)

    def end(self, name: str, epoch: int, *, commit: bool) -> Answer:
        """Decide how a transaction ends; `complete` writes that into the logs."""
        found = self.ids[name]
        if found.epoch != epoch or found.state is not State.ONGOING:
            return Answer.ASK
        found.state = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        return Answer.DECIDED

    def complete(self, name: str) -> State:
        """Write a decided end into the logs; return the state."""
        found = self.ids[name]
        if found.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT):
            committed = found.state is State.PREPARE_COMMIT
            found.state = State.COMPLETE_COMMIT if committed else State.COMPLETE_ABORT
            by = (name, found.epoch)
            for log in self.logs.values():
                if any(record.by == by for record in log):
                    log.append(Record(by, end="commit" if committed else "abort"))
        return found.state

    def stable(self, topic: str) -> int:
        """Return the last stable offset: that of the first record whose transaction has not ended."""
        log = self.logs[topic]
        ended = {record.by for record in log if record.end}
        return next((at for at, record in enumerate(log) if record.by not in ended), len(log))

    def visible(self, topic: str, start: int = 0) -> list[tuple[int, Record]]:
        """Return the committed records from an offset on that readers see."""
        log = self.logs[topic]
        committed = {record.by for record in log if record.end == "commit"}
        found = list(enumerate(log))[start : self.stable(topic)]
        return [(at, record) for at, record in found if not record.end and record.by in committed]


def letter(name: str) -> Record:
    """Return a letter of the sink, in the query's transaction."""
    told = {"key": identity_key(IDENTITY), "error": "too large", "epoch": "0", "target": TOPIC}
    value = json.dumps({"key": "k", "value": name}).encode()
    return Record((QUERY, 1), value, [(header, text.encode()) for header, text in told.items()])


def step(name: str, apply: Callable[[], Any]) -> Any:
    """Make one step of the thread that runs; at once if none does."""
    parent: Any = getcurrent().parent
    return apply() if parent is None else parent.switch(Operation(name, apply, reads=False))


class Producer:
    """Sends what was queued at its flush."""

    def __init__(self, broker: Broker, _options: object, name: str, *_: object) -> None:
        self._broker = broker
        self.transactional_id = name
        self._epoch = 0
        self._queue: list[tuple[str, Record]] = []

    def begin(self) -> None:
        self._epoch = step("initialise", lambda: self._broker.initialise(self.transactional_id))

    def topic_id(self, topic: str) -> str:
        return topic

    def produce_each(self, topic: str, messages: Any, headers: Sequence[Any], _timestamps: object) -> None:
        for (_, _, _, payload, size, *_), told in zip(messages.tolist(), headers, strict=True):
            value = ctypes.string_at(payload, size) if payload else None
            named = [(header["key"], header["value"]) for header in told or ()]
            self._queue.append((topic, Record((self.transactional_id, self._epoch), value, named)))

    def flush(self) -> None:
        step("send", lambda: self._broker.send(self.transactional_id, self._epoch, self._queue))

    def identity(self) -> tuple[int, int]:
        return 1, self._epoch

    def release(self) -> None:
        pass

    def abort(self) -> None:
        step("abort", lambda: self._broker.end(self.transactional_id, self._epoch, commit=False))
        step("complete", lambda: self._broker.complete(self.transactional_id))


class TopicLog:
    """Knows the end of the log."""

    def __init__(self, broker: Broker, _cluster: object, topic: str) -> None:
        self._broker = broker
        self._topic = topic

    def ends(self) -> dict[int, int]:
        found: int = step("ends", lambda: len(self._broker.logs[self._topic]))
        return {0: found}


class Transactions:
    """Ends transactions; a description of one waits for the end to be written."""

    def __init__(self, broker: Broker, _cluster: object) -> None:
        self._broker = broker

    def give_up(self, transaction: Transaction) -> None:
        step("abort", lambda: self._broker.end(transaction.transactional_id, transaction.producer_epoch, commit=False))

    def end(self, transaction: Transaction, _deadline: float, *, commit: bool) -> tuple[Answer, str]:
        name, _, epoch = transaction
        fault, self._broker.fault = self._broker.fault, ""
        answer = Answer.ASK
        if fault != "unsent":
            answer = step("end", lambda: self._broker.end(name, epoch, commit=commit))
        if fault:
            raise Unreachable("no answer")
        return answer, "an answer"

    def describe(self, names: Sequence[str], _deadline: float) -> dict[str, Description]:
        return step("complete", lambda: {name: Description(self._broker.complete(name)) for name in names})  # type: ignore[no-any-return]


class Witness:
    """Counts the records of an open transaction."""

    def __init__(self, broker: Broker, _cluster: object) -> None:
        self._broker = broker

    def look(self, parts: Sequence[KafkaCommittable], _others: object, _deadline: float) -> Seen:
        [part] = parts
        name, _, epoch = part.transaction

        def held() -> int:
            log = [record for each in self._broker.logs.values() for record in each]
            ended = any(record.end and record.by == (name, epoch) for record in log)
            return 0 if ended else sum(record.by == (name, epoch) for record in log)

        whole = step("look", held) == part.rows
        return Seen({}, {0: part} if whole else {}, {} if whole else {0: "gone"}, {}, frozenset())

    def lost(self, *_: object, **__: object) -> Loss:
        return Loss(None)


class Consumer:
    """Reads committed records; says at each last stable offset that the partition ends there."""

    def __init__(self, broker: Broker, _settings: object) -> None:
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


def clients(broker: Broker) -> dict[str, Any]:
    """Return what stands for the clients of `epochsink.kafka.letters`, by name in that module."""
    kinds = {"TransactionalProducer": Producer, "TopicLog": TopicLog, "Transactions": Transactions}
    kinds |= {"Witness": Witness, "Consumer": Consumer}
    clock = mock.Mock(time=lambda: 0.0, monotonic=lambda: broker.clock, sleep=lambda _: None)
    rules = mock.Mock(rules_of_letters=lambda *_: RULES)
    return {name: partial(kind, broker) for name, kind in kinds.items()} | {"time": clock, "preflight": rules}


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
        return self._record and list(self._record.headers)

    def value(self) -> Any:
        return self._record and self._record.value

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


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
    broker = Broker()
    broker.initialise(QUERY)
    broker.send(QUERY, 1, [(ASIDE, letter(name)) for name in LETTERS])
    broker.end(QUERY, 1, commit=True)
    broker.complete(QUERY)

    def command(*, drops: bool) -> None:
        found = kind(SINK, mock.Mock(deadline=lambda: broker.clock + 20), IDENTITY, ASIDE)
        if drops:
            found.drop(Chosen())
        else:
            found.retry(Chosen())

    with ExitStack() as stack:
        for name, each in (clients(broker) | patched).items():
            stack.enter_context(mock.patch.object(letters, name, each))
        raised: list[BaseException | None] = []
        one = Thread("one", partial(command, drops=False), raised.append)
        other = Thread("other", partial(command, drops=plan.drops), raised.append)
        run(one, plan.first)
        epoch = broker.initialise(QUERY)
        broker.send(QUERY, epoch, [(ASIDE, replace(letter("late"), by=(QUERY, epoch)))])
        run(other, plan.second)
        if plan.fault == "killed":
            one.kill()
        else:
            broker.fault = plan.fault
        if plan.before:
            finish(broker, epoch, commits=plan.commits)
        run(other)
        run(one)
        if not plan.before:
            finish(broker, epoch, commits=plan.commits)
        broker.fault = ""
        try:
            command(drops=False)
        except PrepareFailed as stuck:
            return [f"a retry after all that is stuck: {stuck}"]
    told = (PrepareFailed, OutcomeUnknown, type(None))
    unexpected = [repr(error) for error in raised if not isinstance(error, told)]
    return unexpected + wrong(broker, [*LETTERS, *(["late"] if plan.commits else [])])


def finish(broker: Broker, epoch: int, *, commits: bool) -> None:
    """End the query's transaction."""
    broker.end(QUERY, epoch, commit=commits)
    broker.complete(QUERY)


def run(thread: Thread, steps: int = 1000) -> None:
    """Let a thread make steps, to its end at most."""
    while thread.request is not None and steps:
        if isinstance(thread.request, Operation):
            steps -= 1
            try:
                answer = thread.request.apply()
            except NativeError as failure:
                thread.throw(failure)
                continue
            thread.resume(answer)
        else:
            thread.resume(None)


def wrong(broker: Broker, expected: Sequence[str]) -> list[str]:
    """Return which letters are not settled once, or whose rows are not in the topic as often as they say."""
    names = {f"0-{at}": json.loads(record.value or b"")["value"] for at, record in _letters(broker)}
    settled = Counter(
        (names[told["letter"].decode()], told[SETTLED].decode())
        for _, record in broker.visible(ASIDE)
        if SETTLED in (told := dict(record.headers))
    )
    rows = Counter((record.value or b"").decode() for _, record in broker.visible(TOPIC))
    found = [
        f"{name} has {rows[name]} rows, and is settled by {settled}"
        for name in expected
        if not _once(name, settled, rows)
    ]
    return found + [f"{name} is unknown" for name in rows.keys() - set(expected)]


def _letters(broker: Broker) -> Iterator[tuple[int, Record]]:
    return (found for found in broker.visible(ASIDE) if "error" in dict(found[1].headers))


def _once(name: str, settled: Mapping[tuple[str, str], int], rows: Mapping[str, int]) -> bool:
    how = [kind for (of, kind), count in settled.items() for _ in range(count) if of == name]
    return len(how) == 1 and rows.get(name, 0) == (how[0] == WRITTEN)
