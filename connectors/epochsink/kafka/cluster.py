"""Connect the driver to the cluster with kafka-python.

The driver uses kafka-python because its protocol classes can end a transaction that another process began. Its
connection manager, which sends requests, is not public: only this file uses private parts of kafka-python.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient
from kafka.protocol.admin import DescribeConfigsRequest, ListGroupsRequest
from kafka.protocol.admin.transactions import (
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.sasl import SaslAuthenticateRequest

from epochsink.kafka import wire
from epochsink.kafka.client_options import SECRETS, for_kafka_python
from epochsink.kafka.committable import Producer, Transaction
from epochsink.kafka.errors import LEADER_NOT_AVAILABLE, NOT_AUTHORIZED, UNKNOWN_TOPIC
from epochsink.kafka.producer import TransactionalProducer
from epochsink.kafka.server import (
    Description,
    GroupOffsets,
    KafkaServer,
    LeaderRequest,
    ListedTransaction,
    Partition,
    Topic,
    TransactionState,
    raise_for,
    require_all,
)

if TYPE_CHECKING:
    from epochsink.kafka.committed_records import CommittedRecord


_BESIDE: Final = 2
"""Questions that are asked beside another one."""
_COORDINATORS_KEPT: Final = 10_000
_IN_FLIGHT: Final = 64
"""Requests that are sent before the first answer."""
_MOST_IN_FLIGHT: Final = 2 * _IN_FLIGHT
"""For all threads together: kafka-python refuses a request beyond this limit."""

_TRANSACTION: Final = CoordinatorType.TRANSACTION
_TOPIC: Final = 2
_BROKER: Final = 4
"""Kinds of resources in DescribeConfigs."""
_TOPIC_SETTINGS: Final = (
    "cleanup.policy",
    "max.message.bytes",
    "message.timestamp.before.max.ms",
    "message.timestamp.difference.max.ms",
    "message.timestamp.type",
    "min.insync.replicas",
    "retention.bytes",
    "retention.ms",
    "unclean.leader.election.enable",
)
"""The settings that this package checks. To decode all settings takes the driver longer than the rest of a vote."""


class Cluster(KafkaServer):
    """Sends the requests. Connects when first used."""

    def __init__(self, bootstrap_servers: str, options: Mapping[str, str], timeout: float) -> None:
        super().__init__(bootstrap_servers, timeout)
        self._options = options
        self._settings = for_kafka_python(options)
        _redact(options)
        _quieten()
        self._admin: KafkaAdminClient | None = None
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(_BESIDE, thread_name_prefix="epochsink-kafka")
        self._coordinators: dict[tuple[int, str], int] = {}
        self._topics: dict[str, Topic] = {}
        self._brokers: list[int] = []

    def admin(self) -> KafkaAdminClient:
        """Return the connected admin client. Raises `Unreachable`, `Refused`."""
        # the stream's thread and the thread that commits may come here at the same time
        with self._connecting:
            if self._admin is None:
                self._admin = self._connect()
            return self._admin

    def _connect(self) -> KafkaAdminClient:
        milliseconds = int(self.timeout * 1000)
        settings = {
            "request_timeout_ms": min(30_000, milliseconds),
            "retry_backoff_ms": 50,
            "max_in_flight_requests_per_connection": _MOST_IN_FLIGHT,
            "reconnect_backoff_max_ms": 1000,
            "socket_connection_setup_timeout_ms": min(10_000, milliseconds),
            "socket_connection_setup_timeout_max_ms": min(10_000, milliseconds),
        }
        try:
            return _Admin(
                bootstrap_servers=[server.strip() for server in self.servers.split(",")],
                bootstrap_timeout_ms=milliseconds,
                **(settings | self._settings),
            )
        except (kafka_errors.KafkaError, OSError) as failure:
            raise self._translated(failure) from failure

    def beside(self, *questions: Callable[[], Any]) -> list[Any]:
        first, *others = questions
        futures = [self._threads.submit(question) for question in others]
        try:
            answer = first()
        finally:
            wait(futures)
        return [answer, *(each.result() for each in futures)]

    def close(self) -> None:
        self._threads.shutdown()
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    # ---- coordinators of transactional ids

    def end_transaction(self, transaction: Transaction, *, commit: bool) -> int:
        request = wire.end(transaction, commit=commit)
        [answer] = self.ask_coordinators(_TRANSACTION, [transaction.transactional_id], lambda _: request)
        return int(answer.error_code)

    def commit_transactions(self, transactions: Sequence[Transaction]) -> dict[str, int]:
        return self._codes({each.transactional_id: wire.end(each, commit=True) for each in transactions})

    def fence_producers(self, transactions: Collection[Transaction]) -> dict[str, int]:
        return self._codes(
            {each.transactional_id: wire.initialise(each.transactional_id, each) for each in transactions}
        )

    def _codes(self, requests: Mapping[str, Any]) -> dict[str, int]:
        return {name: int(answer.error_code) for name, answer in self.ask_each(_TRANSACTION, requests).items()}

    def initialise_producer(self, transactional_id: str) -> Producer:
        request = wire.initialise(transactional_id, None)
        [answer] = self.ask_coordinators(_TRANSACTION, [transactional_id], lambda _: request)
        raise_for(answer.error_code, f"taking {transactional_id}")
        return Producer(answer.producer_id, answer.producer_epoch)

    def describe_transactions(self, ids: Sequence[str]) -> dict[str, Description]:
        return wire.described(ids, self.ask_coordinators(_TRANSACTION, ids, wire.describe))

    def list_transactions(
        self, states: Sequence[TransactionState], producer_ids: Collection[int]
    ) -> list[ListedTransaction]:
        names, ids = [state.value for state in states], sorted(producer_ids)
        # every broker, because each coordinates some of the ids
        answers = self.ask_brokers(
            lambda: ListTransactionsRequest(state_filters=names, producer_id_filters=ids, min_version=0)
        )
        for answer in answers:
            raise_for(answer.error_code, "listing transactions")
        return [
            ListedTransaction(each.transactional_id, each.producer_id)
            for answer in answers
            for each in answer.transaction_states
        ]

    def add_partitions(self, transaction: Transaction, topic: str, partitions: Collection[int]) -> None:
        request = wire.add_partitions(transaction, topic, partitions)
        [answer] = self.ask_coordinators(_TRANSACTION, [transaction.transactional_id], lambda _: request)
        for joined in answer.results_by_topic_v3_and_below:
            for result in joined.results_by_partition:
                raise_for(result.partition_error_code, f"adding {topic}-{result.partition_index}")

    # ---- coordinators of groups

    def list_groups(self) -> list[str]:
        # every broker, because each coordinates some of the groups
        answers = self.ask_brokers(lambda: ListGroupsRequest(min_version=0))
        for answer in answers:
            raise_for(answer.error_code, "listing groups")
        return [group.group_id for answer in answers for group in answer.groups]

    def group_offsets(
        self, groups: Sequence[str], topics: Collection[str] | None, *, stable: bool
    ) -> list[GroupOffsets]:
        request = partial(wire.group_offsets, topics=topics, stable=stable)
        return wire.offsets_of_groups(self.ask_coordinators(CoordinatorType.GROUP, groups, request))

    # ---- any broker, and the leaders of partitions

    def ask_broker_setting(self, name: str) -> str | None:
        # not describe_cluster of kafka-python, which raises KeyError with brokers before 3.7
        broker = self.ask(MetadataRequest(topics=[]), None).brokers[0].node_id
        return self._settings_of(_BROKER, str(broker), [name], broker).get(name)

    def ask_topic_settings(self, topic: str) -> Mapping[str, str]:
        return self._settings_of(_TOPIC, topic, _TOPIC_SETTINGS, None)

    def _settings_of(self, kind: int, resource: str, names: Sequence[str], node: int | None) -> dict[str, str]:
        request = DescribeConfigsRequest(resources=[(kind, resource, list(names))], include_synonyms=False)
        [result] = self.ask(request, node).results
        if result.error_code == UNKNOWN_TOPIC or result.error_code in NOT_AUTHORIZED:
            return {}
        raise_for(result.error_code, f"the settings of '{resource}'")
        return {entry.name: entry.value for entry in result.configs}

    def topics_known(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: self._topics[name] for name in names if name in self._topics}

    def topics_and(
        self, names: Iterable[str], requests: Sequence[LeaderRequest]
    ) -> tuple[dict[str, Topic], list[dict[Partition, Any]]]:
        wanted = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        # without auto-creation: a question must not create a deleted topic again, under another id
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False)
        metadata, *answers = self.ask_all([(None, request), *_sendable(requests)])
        require_all(names, (description.name for description in metadata.topics), "topics")
        topics = {}
        for description in metadata.topics:
            if description.error_code not in (0, LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC):
                raise_for(description.error_code, f"topic '{description.name}'")
            if description.error_code != UNKNOWN_TOPIC:
                leaders = {each.partition_index: each.leader_id for each in description.partitions}
                topics[description.name] = Topic(description.topic_id.hex, leaders)
        self._topics |= topics
        return topics, _read(requests, answers)

    def ask_leaders(self, requests: Sequence[LeaderRequest]) -> list[dict[Partition, Any]]:
        return _read(requests, self.ask_all(_sendable(requests)))

    def producer(
        self, options: Mapping[str, str], transactional_id: str, transaction_timeout_ms: int
    ) -> TransactionalProducer:
        return TransactionalProducer(options, transactional_id, transaction_timeout_ms, self.timeout, self.servers)

    def committed_records(self, topic: str, ends: Mapping[int, int] | None) -> Iterator[CommittedRecord]:
        # only letters read records, with a client that takes a while to load
        from epochsink.kafka.committed_records import committed_records  # noqa: PLC0415 - see above

        return committed_records(self.servers, self._options, self.timeout, topic, ends)

    def version(self) -> str:
        return ".".join(map(str, self.admin()._manager.broker_version))  # noqa: SLF001 - not told in public

    def describes_transactions(self) -> bool:
        try:
            for request in (DescribeProducersRequest, DescribeTransactionsRequest, ListTransactionsRequest):
                self.admin()._manager.broker_version_data.api_version(request)  # noqa: SLF001 - not told in public
        except kafka_errors.IncompatibleBrokerVersion:
            return False
        return True

    def describe_topic(self, topic: str) -> dict[str, Any]:
        [description] = self.admin().describe_topics([topic])
        return dict(description)

    def create_topic(self, topic: str, how: Mapping[str, Any]) -> None:
        self.admin().create_topics({topic: how}, wait_for_metadata=True)

    def look_again(self) -> None:
        self._topics.clear()
        self._coordinators.clear()
        self._brokers = []
        # kafka-python does not do this: it would keep asking a coordinator that has moved or died, and for five minutes
        # it would not know a broker that was unreachable when it last listed the brokers
        if self._admin is not None:
            known = self._admin._manager.cluster  # noqa: SLF001 - there is no public way
            known._coordinators.clear()  # noqa: SLF001 - likewise
            if (loop := known._refresh_loop_future) is not None and loop.is_done:  # noqa: SLF001 - likewise
                # an OSError has ended it, such as a reset of a TLS connection; asked for an update, it starts anew
                known._refresh_loop_future = None  # noqa: SLF001 - likewise
            known.request_update()

    # ---- how they are sent

    def ask_coordinators(
        self, kind: CoordinatorType, keys: Iterable[str], request: Callable[[list[str]], Any]
    ) -> list[Any]:
        """Send one request to each coordinator of the given transactional ids (or groups) and return the answers.

        ``request`` makes the request for the keys of one coordinator. Raises as `ask_all`.
        """
        nodes = self._by_coordinator(kind, list(keys))
        return self.ask_all([(node, request(mine)) for node, mine in nodes.items()])

    def ask_brokers(self, request: Callable[[], Any]) -> list[Any]:
        """Send a request that ``request`` makes to every broker, and return the answers. Raises as `ask_all`.

        The brokers are listed each time: kafka-python's list may be five minutes old, and lack a broker that
        coordinates. Those of the last time are asked beside that, which saves a round trip.
        """
        known = self._brokers
        metadata, *answers = self.ask_all(
            [(None, MetadataRequest(topics=[])), *((broker, request()) for broker in known)]
        )
        brokers = sorted(broker.node_id for broker in metadata.brokers)
        if brokers != known:
            answers = self.ask_all([(broker, request()) for broker in brokers])
            self._brokers = brokers
        return answers

    def ask_each(self, kind: CoordinatorType, requests: Mapping[str, Any]) -> dict[str, Any]:
        """Send the request of each transactional id (or group) to its coordinator.

        Return the answers that arrived; the outcome of the others is unknown. Raises what kafka-python raises if the
        coordinators cannot be found.
        """
        nodes = self._by_coordinator(kind, list(requests))
        sent = [(node, key) for node, mine in nodes.items() for key in mine]
        answers = self._exchange([(node, requests[key]) for node, key in sent], _answer_or_none)
        by_key = {key: answer for (_, key), answer in zip(sent, answers, strict=True) if answer is not None}
        if len(by_key) < len(requests):
            # a coordinator may have moved or died
            self.look_again()
        return by_key

    def _by_coordinator(self, kind: CoordinatorType, keys: Sequence[str]) -> dict[int, list[str]]:
        if len(self._coordinators) > _COORDINATORS_KEPT:
            self._coordinators.clear()  # with spool=False each id is used once: the cache would grow without limit
        # noted here, because another thread may forget them meanwhile
        known = {key: node for key in keys if (node := self._coordinators.get((kind.value, key))) is not None}
        unknown = [key for key in keys if key not in known]
        if unknown:
            # version 4 is the first that takes several keys
            answer = self.ask(
                FindCoordinatorRequest(key_type=kind.value, coordinator_keys=unknown, min_version=4), None
            )
            for coordinator in answer.coordinators:
                raise_for(coordinator.error_code, f"coordinator of '{coordinator.key}'")
                known[coordinator.key] = self._coordinators[kind.value, coordinator.key] = coordinator.node_id
        nodes: dict[int, list[str]] = {}
        for key in keys:
            nodes.setdefault(known[key], []).append(key)
        return nodes

    def ask(self, request: Any, node: int | None) -> Any:
        """Send one request to a broker, or to any if ``node`` is None. Raises what kafka-python raises."""
        [answer] = self.ask_all([(node, request)])
        return answer

    def ask_all(self, requests: Sequence[tuple[int | None, Any]]) -> list[Any]:
        """Send several requests at once; each broker gets its requests in this order. Raises as `ask`."""
        return self._exchange(requests, _answer)

    def _exchange(
        self, requests: Sequence[tuple[int | None, Any]], answer: Callable[[Any], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        manager = self.admin()._manager  # noqa: SLF001 - no public method sends a request

        async def exchange() -> list[Any]:
            answers: list[Any] = []
            sent: list[Any] = []
            for node, request in requests:
                sent.append(manager.send(request, node))
                # wait for the oldest answer before more is sent than kafka-python allows
                if len(sent) - len(answers) >= _IN_FLIGHT:
                    answers.append(await answer(sent[len(answers)]))
            return answers + [await answer(waiting) for waiting in sent[len(answers) :]]

        replies: list[Any] = manager.run(exchange)
        return replies


class _Admin(KafkaAdminClient):  # type: ignore[misc] # kafka-python has no types
    """An admin client that ends its threads if it cannot connect, and whose time to connect can be set."""

    DEFAULT_CONFIG: ClassVar[dict[str, Any]] = {
        **KafkaAdminClient.DEFAULT_CONFIG,
        "socket_connection_setup_timeout_ms": 10_000,
        "socket_connection_setup_timeout_max_ms": 30_000,
    }

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except BaseException:
            # its network thread would go on otherwise, and each retry would add one
            with contextlib.suppress(Exception):
                self._client.close()
                self._net.stop()
            raise


async def _answer(sent: Any) -> Any:
    return await sent


async def _answer_or_none(sent: Any) -> Any:
    try:
        return await sent
    except (kafka_errors.KafkaError, OSError):
        # the other requests are under way: read their answers too
        return None


def _sendable(requests: Sequence[LeaderRequest]) -> list[tuple[int, Any]]:
    return [(each.node, wire.ask(each.question, each.partitions)) for each in requests]


def _read(requests: Sequence[LeaderRequest], answers: Sequence[Any]) -> list[dict[Partition, Any]]:
    return [wire.read(each.question, answer) for each, answer in zip(requests, answers, strict=True)]


# ---- keep passwords out of kafka-python's debug log, which shows every request as it is sent


def _quieten() -> None:
    """Let kafka-python log warnings only, unless its logger has a level: its INFO is several lines a second."""
    log = logging.getLogger("kafka")
    if log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)


LOGGERS: Final = ("kafka.net.connection", "kafka.protocol.parser", "kafka.net.transport")


class _Silence(logging.Filter):
    """Drops log records with an authentication request or with the bytes of a known secret."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[bytes] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not any(self._holds_secret(argument) for argument in arguments)

    def _holds_secret(self, argument: object) -> bool:
        if isinstance(argument, (bytes, bytearray)):
            return any(secret in argument for secret in self.secrets)
        return isinstance(argument, SaslAuthenticateRequest)


_silence: Final = _Silence()


def _redact(options: Mapping[str, str]) -> None:
    """Keep the secrets in these options out of the log from now on."""
    _silence.secrets |= {value.encode() for name, value in options.items() if name in SECRETS and value}
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_silence)
