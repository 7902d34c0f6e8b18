"""How each server answers a request that it does not carry out: it cannot now, or the client may not."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kafka.protocol import admin, metadata, producer

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Refusal:
    """What reaches the server in place of a request, and what the client gets in place of the answer to that.

    Without a ``reply`` the client gets the server's own. The connection ends with it if it ``ends``.
    """

    data: bytes
    reply: bytes | None = None
    ends: bool = False


# ---- PostgreSQL: the server itself refuses, so the state of its transaction is the real one

_FULL, _FORBIDDEN = "No space left on device", "permission denied"
_RAISES_FULL = f"DO $$ BEGIN RAISE EXCEPTION '{_FULL}' USING ERRCODE = '53100'; END $$"
# who may do all else may not do this; what a function raises would not be the server's own refusal
_IS_FORBIDDEN = "ALTER TABLE pg_catalog.pg_class ADD COLUMN refused int"
_CROWDED, _NO_LOGIN = ("53300", "too many clients already"), ("28000", "login is not permitted")


def of_statement(group: bytes, *, forbidden: bool) -> Refusal:
    """Return what has the server refuse a statement of either protocol."""
    statement = (_IS_FORBIDDEN if forbidden else _RAISES_FULL).encode() + b"\0"
    if group[:1] == b"Q":
        return Refusal(_message(b"Q", statement))
    parse = _message(b"P", b"\0" + statement + struct.pack(">h", 0))
    bind = _message(b"B", b"\0\0" + struct.pack(">hhh", 0, 0, 0))
    return Refusal(parse + bind + _message(b"E", b"\0" + struct.pack(">i", 0)) + _message(b"S", b""))


def of_copy(data: bytes, *, forbidden: bool) -> Refusal:  # noqa: ARG001 - one signature for all
    """Return what has the server refuse the rows that were copied."""
    text = _FORBIDDEN if forbidden else _FULL
    return Refusal(_message(b"f", text.encode() + b"\0"))


def of_login(data: bytes, *, forbidden: bool) -> Refusal:
    """Return how the server refuses a session."""
    state, text = _NO_LOGIN if forbidden else _CROWDED
    fields = {b"S": b"FATAL", b"V": b"FATAL", b"C": state.encode(), b"M": text.encode()}
    body = b"".join(name + value + b"\0" for name, value in fields.items()) + b"\0"
    return Refusal(data, _message(b"E", body), ends=True)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">i", len(body) + 4) + body


# ---- Elasticsearch

_BUSY_TYPE, _FORBIDDEN_TYPE = "circuit_breaking_exception", "security_exception"


def of_http(data: bytes, *, forbidden: bool) -> Refusal:
    """Return an answer to any request."""
    method, _, _ = data.partition(b" ")
    harmless = (b"HEAD" if method == b"HEAD" else b"GET") + b" / HTTP/1.1\r\nhost: proxy\r\n\r\n"
    status, kind = (403, _FORBIDDEN_TYPE) if forbidden else (429, _BUSY_TYPE)
    cause = {"type": kind, "reason": "refused by the proxy"}
    body = json.dumps({"error": {"root_cause": [cause], **cause}, "status": status}).encode()
    head = [
        f"HTTP/1.1 {status} Refused",
        "X-elastic-product: Elasticsearch",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return Refusal(harmless, "\r\n".join([*head, "", ""]).encode() + (b"" if method == b"HEAD" else body))


# ---- Kafka

_NOT_NOW: Final = {"coordinator": 14, "partition": 6, "topic": 7}
"""COORDINATOR_LOAD_IN_PROGRESS, NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT."""
_NOT_ALLOWED: Final = {"coordinator": 53, "partition": 29, "topic": 29}
"""TRANSACTIONAL_ID_AUTHORIZATION_FAILED, TOPIC_AUTHORIZATION_FAILED."""
_GROUP_NOT_ALLOWED: Final = 30
_API_VERSIONS: Final = 18


def of_frame(frame: bytes, *, forbidden: bool) -> Refusal:
    """Return an answer to a request of `KAFKA`: the broker gets a harmless one of the same number."""
    key, version, number = struct.unpack_from(">hhi", frame, 4)
    request, answer = KAFKA[key]
    codes = _NOT_ALLOWED if forbidden else _NOT_NOW
    reply = answer(request.decode(frame, version=version, header=True, framed=True), codes)
    reply.API_VERSION = version
    reply.with_header(number)
    harmless = struct.pack(">ihhih", 10, _API_VERSIONS, 0, number, -1)
    return Refusal(harmless, reply.encode(header=True, framed=True))


def _init(request: Any, codes: dict[str, int]) -> Any:  # noqa: ARG001 - one signature for all
    return producer.InitProducerIdResponse(error_code=codes["coordinator"], producer_id=-1, producer_epoch=-1)


def _end(request: Any, codes: dict[str, int]) -> Any:  # noqa: ARG001
    return producer.EndTxnResponse(error_code=codes["coordinator"])


def _add_offsets(request: Any, codes: dict[str, int]) -> Any:  # noqa: ARG001
    return producer.AddOffsetsToTxnResponse(error_code=codes["coordinator"])


def _add_partitions(request: Any, codes: dict[str, int]) -> Any:
    of_topic = producer.AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
    topics = [
        of_topic(
            name=topic.name,
            results_by_partition=[
                of_topic.AddPartitionsToTxnPartitionResult(
                    partition_index=partition, partition_error_code=codes["coordinator"]
                )
                for partition in topic.partitions
            ],
        )
        for topic in request.v3_and_below_topics
    ]
    return producer.AddPartitionsToTxnResponse(results_by_topic_v3_and_below=topics)


def _commit_offsets(request: Any, codes: dict[str, int]) -> Any:
    code = _GROUP_NOT_ALLOWED if codes is _NOT_ALLOWED else codes["coordinator"]
    of_topic = producer.TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
    topics = [
        of_topic(
            name=topic.name,
            partitions=[
                of_topic.TxnOffsetCommitResponsePartition(partition_index=one.partition_index, error_code=code)
                for one in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return producer.TxnOffsetCommitResponse(topics=topics)


def _produce(request: Any, codes: dict[str, int]) -> Any:
    of_topic = producer.ProduceResponse.TopicProduceResponse
    topics = [
        of_topic(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=[
                of_topic.PartitionProduceResponse(index=one.index, error_code=codes["partition"], base_offset=-1)
                for one in topic.partition_data
            ],
        )
        for topic in request.topic_data
    ]
    return producer.ProduceResponse(responses=topics)


def _find_coordinator(request: Any, codes: dict[str, int]) -> Any:
    code, nowhere = codes["coordinator"], {"node_id": -1, "host": "", "port": -1, "error_message": None}
    of_key = metadata.FindCoordinatorResponse.Coordinator
    found = [of_key(key=key, error_code=code, **nowhere) for key in request.coordinator_keys or ()]
    return metadata.FindCoordinatorResponse(error_code=code, coordinators=found, **nowhere)


def _create_topics(request: Any, codes: dict[str, int]) -> Any:
    of_topic = admin.CreateTopicsResponse.CreatableTopicResult
    topics = [of_topic(name=topic.name, error_code=codes["topic"], error_message=None) for topic in request.topics]
    return admin.CreateTopicsResponse(topics=topics)


KAFKA: Final[dict[int, tuple[Any, Callable[[Any, dict[str, int]], Any]]]] = {
    0: (producer.ProduceRequest, _produce),
    10: (metadata.FindCoordinatorRequest, _find_coordinator),
    19: (admin.CreateTopicsRequest, _create_topics),
    22: (producer.InitProducerIdRequest, _init),
    24: (producer.AddPartitionsToTxnRequest, _add_partitions),
    25: (producer.AddOffsetsToTxnRequest, _add_offsets),
    26: (producer.EndTxnRequest, _end),
    28: (producer.TxnOffsetCommitRequest, _commit_offsets),
}
"""The requests whose refusals are known, by their keys."""
