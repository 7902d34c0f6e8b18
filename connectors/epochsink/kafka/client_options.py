"""Check the client options, and translate them for both clients. Their names are librdkafka's.

Tasks produce with librdkafka, and the driver ends transactions with kafka-python. Options of connections and
credentials go to both clients, or are refused. All other options only tune the producer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Final

from epochsink.credentials import Secret, is_loopback
from epochsink.errors import ConfigurationError
from epochsink.kafka.librdkafka import CONF_UNKNOWN, OK, Library, library

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

ALIASES: Final = {
    "acks": "request.required.acks",
    "metadata.broker.list": "bootstrap.servers",
    "sasl.mechanisms": "sasl.mechanism",
    "delivery.timeout.ms": "message.timeout.ms",
    "retries": "message.send.max.retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
}

SECRETS: Final = frozenset({"sasl.password", "ssl.key.password"})

_SET_BY_EPOCHSINK: Final = "epochsink sets it, because the names and the fencing of transactions depend on it"
FORBIDDEN: Final = {
    "transactional.id": _SET_BY_EPOCHSINK,
    "transaction.timeout.ms": "set transaction_timeout= of Kafka(...) instead, which is compared with the broker's cap",
    "bootstrap.servers": "set bootstrap_servers= of Kafka(...) instead",
    "statistics.interval.ms": "epochsink reads the producer's id from the statistics",
    "delivery.report.only.error": "epochsink needs a report of each row that was not delivered",
    "log.queue": "librdkafka's log goes to Python's logger 'librdkafka'",
    "enable.metrics.push": "a producer lives for one transaction, too short for telemetry",
    "enable.ssl.certificate.verification": "without verification another server could get the rows and the "
    "password: name the authority with ssl.ca.location",
    "group.id": "it belongs to consumers",
}
REQUIRED: Final = {
    "enable.idempotence": (("true",), "a retry would duplicate rows"),
    "request.required.acks": (("all", "-1"), "acknowledged rows could be lost with one broker"),
}

_SPARKS_PREFIX: Final = "kafka."
_ENDPOINT_CHECK: Final = "ssl.endpoint.identification.algorithm"

TRANSLATION: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "security.protocol": ("security_protocol", str.upper),
    "sasl.mechanism": ("sasl_mechanism", str.upper),
    "sasl.username": ("sasl_plain_username", lambda value: value),
    "sasl.password": ("sasl_plain_password", lambda value: value),
    "ssl.ca.location": ("ssl_cafile", str),
    "ssl.certificate.location": ("ssl_certfile", str),
    "ssl.key.location": ("ssl_keyfile", str),
    "ssl.key.password": ("ssl_password", lambda value: value),
    "ssl.crl.location": ("ssl_crlfile", str),
    _ENDPOINT_CHECK: ("ssl_check_hostname", lambda value: value == "https"),
    "client.id": ("client_id", str),
    "socket.timeout.ms": ("request_timeout_ms", int),
}
"""Option of librdkafka -> (argument of kafka-python, conversion)."""

_CONNECTION_PREFIXES: Final = ("sasl.", "ssl.", "security.", "https.", "socket.nagle", "enable.sasl.", "enable.ssl.")


def normalise(options: Mapping[str, Any], bootstrap_servers: str, *, allow_insecure: bool) -> dict[str, str]:
    """Return the options as strings under their main names. Raises ConfigurationError for a forbidden option."""
    known: dict[str, str] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        known[name] = Secret(text) if name in SECRETS else text
    # after the translation to main names: otherwise an alias of a forbidden option would pass
    for name, value in known.items():
        _refuse(name, value)
    _refuse_combination(known)
    if not allow_insecure:
        _refuse_unencrypted_password(known, bootstrap_servers)
    return known


def for_kafka_python(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for kafka-python, under its names."""
    return {TRANSLATION[name][0]: TRANSLATION[name][1](value) for name, value in options.items() if name in TRANSLATION}


def _refuse(name: str, value: str) -> None:
    if name.startswith(_SPARKS_PREFIX):
        raise ConfigurationError(
            f"options: '{name}' has the prefix of Spark's own Kafka sink",
            hint=f"drop the prefix: '{name.removeprefix(_SPARKS_PREFIX)}'",
        )
    if name in FORBIDDEN:
        raise ConfigurationError(f"options: '{name}' cannot be set: {FORBIDDEN[name]}", hint="leave it out")
    if name in REQUIRED and value not in REQUIRED[name][0]:
        allowed, reason = REQUIRED[name]
        raise ConfigurationError(
            f"options: '{name}' = '{value}' is not exactly-once: {reason}",
            hint=f"leave it out, or set it to '{allowed[0]}'",
        )
    if name.startswith(_CONNECTION_PREFIXES) and name not in TRANSLATION:
        raise ConfigurationError(
            f"options: '{name}' is known to the tasks' client only, and the driver's client would need it too",
            hint=f"use the options that both clients know: {', '.join(sorted(TRANSLATION))}",
        )


def _refuse_combination(options: Mapping[str, str]) -> None:
    protocol = options.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in PROTOCOLS:
        raise ConfigurationError(
            f"options: 'security.protocol' = '{protocol}' is unknown", hint=f"one of {', '.join(PROTOCOLS)}"
        )
    with_sasl = [name for name in options if name.startswith("sasl.")]
    if with_sasl and not protocol.startswith("SASL"):
        raise ConfigurationError(
            f"options: '{with_sasl[0]}' is given, and 'security.protocol' = '{protocol}' would not use it",
            hint="set 'security.protocol' to SASL_SSL",
        )
    mechanism = options.get("sasl.mechanism", "").upper()
    if protocol.startswith("SASL") and mechanism not in MECHANISMS:
        raise ConfigurationError(
            f"options: 'sasl.mechanism' = '{mechanism}' is not supported by both clients",
            hint=f"one of {', '.join(MECHANISMS)}",
        )


def _refuse_unencrypted_password(options: Mapping[str, str], bootstrap_servers: str) -> None:
    unencrypted = options.get("security.protocol", "").upper() == "SASL_PLAINTEXT"
    if not unencrypted or options.get("sasl.mechanism", "").upper() != "PLAIN":
        return
    for server in bootstrap_servers.split(","):
        host = server.strip().rpartition(":")[0].strip("[]")
        if not is_loopback(host):
            raise ConfigurationError(
                f"options: SASL_PLAINTEXT with PLAIN would send the password unencrypted to {host}",
                hint="use SASL_SSL or SCRAM, or allow_insecure=True on a network that nobody else can read",
            )


# ---- the settings of a producer: our defaults, then the user's options, then what transactions need

BYTES_IN_FLIGHT: Final = 64 << 20
"""Bytes, roughly, in librdkafka's queue before a task waits for the broker."""

BATCH_BYTES: Final = 1 << 20
"""The size of librdkafka's batches in bytes, if the topic allows it."""

CONNECTED_AT_ONCE: Final = {"enable.sparse.connections": "false"}
"""Lets librdkafka connect to every broker that it hears of. Otherwise it connects to one after another, with 11 ms in
between, for which a task with few rows would wait. For clusters of few brokers, most of which it needs anyway."""

STATISTICS_MS: Final = 100
"""Milliseconds between librdkafka's statistics, which contain the producer's id and epoch. A task with few rows is done
with all else before they come, so these are read from a line of the log: statistics are for a librdkafka that words it
differently. Every 20 ms they cost 0.5 % of a core with 2 partitions, and 2 % with 200."""

_IDENTITY_LOGGED: Final = "eos"
"""The part of librdkafka's log that has the producer's id and epoch: a few lines a transaction and partition."""

_SHORTEST_ANSWER_MS: Final = 1_000

_FORCED: Final = {
    "enable.idempotence": "true",
    "statistics.interval.ms": str(STATISTICS_MS),
    "delivery.report.only.error": "true",
    "enable.metrics.push": "false",
    "log.queue": "true",
}
_DEFAULTS: Final = {
    "partitioner": "murmur2_random",  # as in the Java client: each key stays in its partition
    "linger.ms": "20",
    "reconnect.backoff.ms": "2",  # half of it is a pause before the first connection
    "batch.size": str(BATCH_BYTES),
    "batch.num.messages": "100000",
    "queue.buffering.max.messages": "1000000",
    "queue.buffering.max.kbytes": str((4 * BYTES_IN_FLIGHT) >> 10),
}


def merged(
    options: Mapping[str, str],
    bootstrap_servers: str,
    transactional_id: str,
    transaction_timeout_ms: int,
    timeout: float,
) -> dict[str, str]:
    """Return all settings of a producer. ``timeout`` (seconds) is how long it waits for the answer to a request."""
    answer_ms = max(_SHORTEST_ANSWER_MS, round(1000 * timeout))
    return (
        _DEFAULTS
        | {
            # as long as the transaction may be open, for a slow broker or one with a quota
            "delivery.timeout.ms": str(transaction_timeout_ms),
            # librdkafka would wait almost as long as the transaction may be open, if need be for minutes
            "socket.timeout.ms": str(min(answer_ms, transaction_timeout_ms)),
        }
        | dict(options)
        | _FORCED
        | {
            "debug": ",".join(filter(None, (options.get("debug"), _IDENTITY_LOGGED))),
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": str(transaction_timeout_ms),
        }
    )


def fitting(options: Mapping[str, str], largest_batch: int | None) -> Mapping[str, str]:
    """Return the options with a default batch size that the topic allows: ``largest_batch`` bytes, if known.

    Brokers refuse a batch above the topic's max.message.bytes, even if each of its rows is small.
    """
    if largest_batch is None or largest_batch >= BATCH_BYTES:
        return options
    return {"batch.size": str(largest_batch), **options}


def configure(rdkafka: Library, options: Mapping[str, str]) -> int:
    """Return a ``rd_kafka_conf_t *``. Raises ConfigurationError for an option that librdkafka refuses."""
    conf: int = rdkafka.conf_new()
    reason = ctypes.create_string_buffer(512)
    for name, value in options.items():
        answer = rdkafka.conf_set(conf, name.encode(), value.encode(), reason, len(reason))
        if answer != OK:
            rdkafka.conf_destroy(conf)
            if answer == CONF_UNKNOWN:
                raise ConfigurationError(
                    f"options: librdkafka {rdkafka.version_str().decode()} knows no option '{name}'",
                    hint="see librdkafka's CONFIGURATION.md for the names",
                )
            # the reason contains the value, which may be a secret
            text = reason.value.decode(errors="replace").replace(value, "***") if value else reason.value.decode()
            raise ConfigurationError(f"options: librdkafka refuses the value of '{name}': {text}")
    return conf


def largest_message(options: Mapping[str, str]) -> int:
    """Return the client's message.max.bytes with these options."""
    rdkafka = library()
    conf = configure(rdkafka, options)
    try:
        return int(value(rdkafka, conf, "message.max.bytes"))
    finally:
        rdkafka.conf_destroy(conf)


def check_options(options: Mapping[str, str]) -> None:
    """Raise ConfigurationError for an option that librdkafka refuses. Does not connect."""
    rdkafka = library()
    rdkafka.conf_destroy(configure(rdkafka, options))


def value(rdkafka: Library, conf: int, name: str) -> str:
    """Return one setting of a ``rd_kafka_conf_t *``."""
    text = ctypes.create_string_buffer(512)
    size = ctypes.c_size_t(len(text))
    rdkafka.conf_get(conf, name.encode(), text, ctypes.byref(size))
    return text.value.decode()
