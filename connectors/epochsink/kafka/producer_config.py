"""The producing client's settings: the user's, over our defaults, under what transactions need."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from epochsink.errors import ConfigurationError
from epochsink.kafka import librdkafka
from epochsink.kafka.librdkafka import OK, Library, library

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES_IN_FLIGHT: Final = 64 << 20
"""How much a task lets librdkafka hold, roughly, before it waits for the broker."""

_LEAST_BYTES_IN_FLIGHT: Final = 1 << 20
_PART_OF_DELIVERY_TIME: Final = 0.25
_PACE_SECONDS: Final = 1.0
"""Before that, a broker's pace is not known."""

BATCH_BYTES: Final = 1 << 20
"""How much librdkafka sends to a partition at once, if the topic takes it."""

STATISTICS_MS: Final = 50
"""The producer's id and epoch are told only by librdkafka's statistics; this is the longest wait for them."""

_FORCED: Final = {
    "enable.idempotence": "true",
    "statistics.interval.ms": str(STATISTICS_MS),
    "delivery.report.only.error": "true",
    "enable.metrics.push": "false",
    "log.queue": "true",
}
_DEFAULTS: Final = {
    "partitioner": "murmur2_random",  # as the Java client, so that keys stay on their partitions
    "linger.ms": "20",
    "reconnect.backoff.ms": "20",  # half of it is the pause before the first real connection
    "batch.size": str(BATCH_BYTES),
    "batch.num.messages": "100000",
    "queue.buffering.max.messages": "1000000",
    "queue.buffering.max.kbytes": str((4 * BYTES_IN_FLIGHT) >> 10),
}


def merged(
    options: Mapping[str, str], bootstrap_servers: str, transactional_id: str, transaction_timeout_ms: int
) -> dict[str, str]:
    """Return all settings of one transaction's producer."""
    return (
        _DEFAULTS
        # a broker that is slow, or holds us to a quota, may take all the time that there is
        | {"delivery.timeout.ms": str(transaction_timeout_ms)}
        | dict(options)
        | _FORCED
        | {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": str(transaction_timeout_ms),
        }
    )


def window(taken: int, seconds: float, delivery_seconds: float) -> int:
    """Return how many bytes may wait for a broker that has taken ``taken`` bytes in so many seconds.

    A slow one, or one that holds us to a quota, gets no more than it takes in a part of the time in which each row has
    to be delivered: what waits longer is given up.
    """
    if seconds < _PACE_SECONDS:
        return BYTES_IN_FLIGHT
    in_time = taken / seconds * delivery_seconds * _PART_OF_DELIVERY_TIME
    return min(BYTES_IN_FLIGHT, max(_LEAST_BYTES_IN_FLIGHT, int(in_time)))


def fitting(options: Mapping[str, str], largest_batch: int | None) -> Mapping[str, str]:
    """Return options with batches that a topic takes, of ``largest_batch`` bytes if that is known.

    A batch above the topic's max.message.bytes is refused as a whole, however small its rows are.
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
            if answer == librdkafka.CONF_UNKNOWN:
                raise ConfigurationError(
                    f"options: librdkafka {rdkafka.version_str().decode()} knows no option '{name}'",
                    hint="see librdkafka's CONFIGURATION.md for the names",
                )
            # the reason repeats the value, which may be a secret
            text = reason.value.decode(errors="replace").replace(value, "***") if value else reason.value.decode()
            raise ConfigurationError(f"options: librdkafka refuses the value of '{name}': {text}")
    return conf


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
