"""What the proxy of the request faults takes for the end of a reply."""

from __future__ import annotations

import importlib
import re
import socket
import struct
from collections import deque
from typing import Any

import pytest
from kafka.protocol import admin, metadata, producer

from request_faults.framings import Postgres
from request_faults.refusals import KAFKA, of_frame
from request_faults.wire import Fate, Request, Strike

TOPIC = "t"
ASKED: dict[int, Any] = {
    0: producer.ProduceRequest(
        acks=-1,
        topic_data=[
            producer.ProduceRequest.TopicProduceData(
                name=TOPIC,
                partition_data=[producer.ProduceRequest.TopicProduceData.PartitionProduceData(index=1, records=b"")],
            )
        ],
    ),
    10: metadata.FindCoordinatorRequest(key="a", key_type=1, coordinator_keys=["a"]),
    19: admin.CreateTopicsRequest(topics=[admin.CreateTopicsRequest.CreatableTopic(name=TOPIC)]),
    22: producer.InitProducerIdRequest(transactional_id="a"),
    24: producer.AddPartitionsToTxnRequest(
        v3_and_below_topics=[
            producer.AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction.AddPartitionsToTxnTopic(
                name=TOPIC, partitions=[0, 1]
            )
        ]
    ),
    25: producer.AddOffsetsToTxnRequest(transactional_id="a", group_id="g"),
    26: producer.EndTxnRequest(transactional_id="a", committed=True),
    28: producer.TxnOffsetCommitRequest(
        topics=[
            producer.TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                name=TOPIC,
                partitions=[
                    producer.TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition(
                        partition_index=0
                    )
                ],
            )
        ]
    ),
}
VERSIONS = {0: range(3, 13), 10: range(5), 19: range(2, 8), 22: range(6), 24: range(4)} | {
    25: range(5),
    26: range(6),
    28: range(6),
}


@pytest.mark.parametrize("fate", [Fate.HELD, Fate.DIES_AFTER])
def test_a_login_that_was_held_ends_with_the_question_that_a_dead_driver_does_not_answer(fate: Fate) -> None:
    """The proxy waited 30 s for more, in each such plan."""
    question = struct.pack(">cii", b"R", 8 + 5, 10) + b"SASL\0"
    login = Request(b"", "connect", strike=Strike("connect", 0, fate))
    server, proxy = socket.socketpair()
    with server, proxy:
        server.sendall(question)
        server.shutdown(socket.SHUT_WR)
        assert list(Postgres().replies(proxy, deque([login]))) == [(question, login, fate is Fate.HELD)]


@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("key", KAFKA)
def test_a_request_that_is_refused_gets_an_answer_of_its_number_with_an_error_for_each_part(
    key: int,
    forbidden: bool,  # noqa: FBT001 - pytest's way
) -> None:
    asked, number = ASKED[key], 77
    for version in VERSIONS[key]:
        asked.API_VERSION = version
        asked.with_header(number)
        refusal = of_frame(asked.encode(header=True, framed=True), forbidden=forbidden)
        assert struct.unpack_from(">hhi", refusal.data, 4) == (18, 0, number)
        assert refusal.reply is not None
        answer = type(asked).__name__.replace("Request", "Response")
        kind = getattr(importlib.import_module(type(asked).__module__), answer)
        told = kind.decode(refusal.reply, version=version, header=True, framed=True)
        assert told.header.correlation_id == number
        codes = re.findall(r"(?<!config_)error_code=(\d+)", str(told))
        assert codes
        assert set(codes) <= ({"29", "30", "53"} if forbidden else {"6", "7", "14"})
