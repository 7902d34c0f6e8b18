"""Constructing a Kafka sink: what is refused without asking the cluster, and why."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from epochsink.errors import ConfigurationError
from epochsink.kafka import Kafka, NewTopic, client_options, producer
from epochsink.kafka.client_options import for_kafka_python, merged
from epochsink.sink import Identity

PASSWORD = "canary-s3cr3t"
SASL = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "me",
    "sasl.password": PASSWORD,
}


def made(**settings: Any) -> Kafka:
    return Kafka(**({"bootstrap_servers": "broker:9092", "topic": "orders"} | settings))


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        made(**settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("transactional.id", "mine", "epochsink sets it"),
        ("transaction.timeout.ms", 5, "transaction_timeout="),
        ("bootstrap.servers", "a:1", "bootstrap_servers="),
        ("metadata.broker.list", "a:1", "bootstrap_servers="),
        ("enable.idempotence", False, "duplicate"),
        ("enable.idempotence", "false", "duplicate"),
        ("acks", 1, "lost"),
        ("request.required.acks", "0", "lost"),
        ("group.id", "g", "consumers"),
        ("statistics.interval.ms", 0, "statistics"),
        ("enable.ssl.certificate.verification", False, "ssl.ca.location"),
        ("sasl.kerberos.keytab", "/x", "known to the tasks' client only"),
        ("ssl.engine.location", "/x", "known to the tasks' client only"),
        ("security.protocol", "HTTP", "unknown"),
        ("sasl.password", PASSWORD, "would not use it"),
        ("no.such.option", 1, "knows no option 'no.such.option'"),
        ("linger.ms", "soon", "refuses the value of 'linger.ms'"),
        ("compression.type", "rar", "refuses the value of 'compression.type'"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_with_the_reason(option: str, value: Any, reason: str) -> None:
    found = refusal(options={option: value})
    assert reason in found
    assert PASSWORD not in found


@pytest.mark.parametrize("value", ["all", "-1", -1])
def test_what_is_meant_anyway_may_be_said(value: Any) -> None:
    made(options={"acks": value, "enable.idempotence": True, "linger.ms": 5, "compression.type": "zstd"})


@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", ""])
def test_a_mechanism_that_only_one_client_has_is_refused(mechanism: str) -> None:
    assert "not supported by both clients" in refusal(options=SASL | {"sasl.mechanism": mechanism})


@pytest.mark.parametrize("host", ["broker:9092", "10.0.0.1:9092", "127.0.0.1:9092,broker:9092"])
def test_a_password_is_not_sent_unencrypted_unless_allowed(host: str) -> None:
    in_clear = SASL | {"security.protocol": "SASL_PLAINTEXT"}
    assert "unencrypted" in refusal(bootstrap_servers=host, options=in_clear)
    made(bootstrap_servers=host, options=in_clear, allow_insecure=True)
    made(bootstrap_servers=host, options=in_clear | {"sasl.mechanism": "SCRAM-SHA-512"})


@pytest.mark.parametrize("host", ["localhost:9092", "127.0.0.1:9092", "[::1]:9092"])
def test_a_password_may_be_readable_on_this_machine(host: str) -> None:
    made(bootstrap_servers=host, options=SASL | {"security.protocol": "SASL_PLAINTEXT"})


def test_options_reach_the_drivers_client_under_its_names() -> None:
    config = made(
        options=SASL
        | {
            "ssl.ca.location": "/ca.pem",
            "ssl.endpoint.identification.algorithm": "none",
            "client.id": "me",
            "socket.timeout.ms": 7000,
            "linger.ms": 5,
        }
    )
    assert for_kafka_python(config.options) == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "me",
        "sasl_plain_password": PASSWORD,
        "ssl_cafile": "/ca.pem",
        "ssl_check_hostname": False,
        "client_id": "me",
        "request_timeout_ms": 7000,
    }


@pytest.mark.parametrize(
    ("options", "timeout", "expected"),
    [
        ({}, 2, "2000"),
        ({}, 120, "60000"),  # librdkafka refuses more than the transaction timeout
        ({}, 0.001, "1000"),
        ({"socket.timeout.ms": "7000"}, 2, "7000"),
    ],
)
def test_a_task_waits_for_an_answer_as_long_as_timeout_says(
    options: dict[str, str], timeout: float, expected: str
) -> None:
    """By default, librdkafka would wait for the answer to a marker as long as the transaction may be open."""
    assert merged(options, "b:9092", "id", 60_000, timeout)["socket.timeout.ms"] == expected


def test_a_secret_crosses_to_the_executors_and_shows_nowhere() -> None:
    config = pickle.loads(pickle.dumps(made(options=SASL)))  # noqa: S301 - as it crosses
    assert config.options["sasl.password"] == PASSWORD
    assert config == made(options=SASL)
    for shown in (repr(config), str(config), f"{config.options}", repr(for_kafka_python(config.options))):
        assert PASSWORD not in shown
    assert "topic='orders'" in repr(config)


@pytest.mark.parametrize("topic", ["", "a b", 'x"; drop table y;--', "a\nb", ".", "..", "x" * 250, "täglich"])
def test_a_hostile_topic_is_refused(topic: str) -> None:
    assert "topic" in refusal(topic=topic)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bootstrap_servers": " "}, "invalid bootstrap_servers="),
        ({"topic_column": "t"}, "both set"),
        ({"topic": None, "create": NewTopic()}, "without topic="),
        ({"transaction_timeout": 0.5}, "no time to write"),
        ({"timeout": 0}, "invalid timeout=0"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], reason: str) -> None:
    assert reason in refusal(**settings)


def test_the_transaction_timeout_is_as_said_or_short_where_rows_are_kept_and_the_cap_elsewhere() -> None:
    found = Identity("q", "s", 1, {"transaction_timeout": 120.0})
    untold = Identity("q", "s", 1)
    assert made(transaction_timeout=30).transaction_timeout_ms(found) == 30_000
    assert made().transaction_timeout_ms(found) == 60_000
    assert made().transaction_timeout_ms(Identity("q", "s", 1, {"transaction_timeout": 5.0})) == 5_000
    assert made(options={"delivery.timeout.ms": 90_000}).transaction_timeout_ms(found) == 90_000
    assert made(spool=True).transaction_timeout_ms(found) == 60_000
    assert made(spool=False).transaction_timeout_ms(found) == 120_000
    assert made(spool=False).transaction_timeout_ms(untold) == 900_000
    assert made().longest_transaction_timeout_ms(found) == 120_000
    assert made(transaction_timeout=300).longest_transaction_timeout_ms(found) == 300_000
    assert made().longest_transaction_timeout_ms(untold) == 60_000, "longer might be refused"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"key": 5}, "invalid key=5: expected a string"),
        ({"key": ["a", "b"]}, 'key="to_json(struct(a, b))"'),
        ({"topic": 5}, "invalid topic=5: expected a string"),
        ({"bootstrap_servers": None}, "invalid bootstrap_servers=None"),
        ({"select": 5}, "invalid select=5"),
        ({"where": ""}, "invalid where=''"),
        ({"spool": "no"}, "invalid spool='no': expected True or False"),
        ({"allow_insecure": 1}, "invalid allow_insecure=1"),
        ({"create": NewTopic}, "expected True, False or NewTopic(...)"),
        ({"create": "yes"}, "expected True, False or NewTopic(...)"),
        ({"timeout": "2"}, "invalid timeout='2'"),
        ({"options": "linger.ms=5"}, "invalid options="),
        ({"options": {"kafka.security.protocol": "SSL"}}, "drop the prefix: 'security.protocol'"),
        ({"keys": "a"}, "did you mean key=?"),
        ({"create_topic": True}, "or create=?"),
        ({"tpoic": "a"}, "did you mean topic=?"),
    ],
)
def test_a_wrong_argument_is_named(settings: dict[str, Any], reason: str) -> None:
    assert reason in refusal(**settings)


def test_missing_and_positional_arguments_are_named() -> None:
    make: Any = Kafka
    with pytest.raises(ConfigurationError, match="'bootstrap_servers'"):
        make(topic="orders")
    with pytest.raises(ConfigurationError, match="too many positional arguments"):
        make("broker:9092", topic="orders")


@pytest.mark.parametrize("settings", [{"partitions": 0}, {"partitions": "6"}, {"replication": 0}, {"config": "x"}])
def test_a_wrong_argument_of_a_new_topic_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"invalid {next(iter(settings))}="):
        NewTopic(**settings)


def test_one_expression_may_be_a_string_or_a_list() -> None:
    assert made(select="order_id").select == ("order_id",)
    assert made(select=["order_id", "region"]).select == ("order_id", "region")
    assert made(key=["order_id"]) == made(key="order_id")


def test_configurations_are_values() -> None:
    one, same = (made(options={"linger.ms": 5}, create=NewTopic(2, config={"a": "b"})) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - as it crosses
    assert one != made()


def test_a_slow_broker_gets_no_more_than_it_takes_in_time() -> None:
    whole = client_options.BYTES_IN_FLIGHT
    assert producer.window(0, 0.5, 60) == whole, "its pace is not known yet"
    assert producer.window(100_000_000, 1, 60) == whole
    assert producer.window(10_000_000, 10, 60) == 15_000_000
    assert producer.window(1_000, 100, 60) == 1 << 20
