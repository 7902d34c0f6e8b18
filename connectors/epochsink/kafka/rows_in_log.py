"""Whether a topic itself keeps the rows of an epoch for as long as they may be needed, so that no copy has to.

Records of an aborted transaction stay in the log as long as those of a committed one. That is long enough where nothing
but time removes them, and not too little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from epochsink.kafka import row_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from epochsink.kafka.config import KafkaConfig

LEAST_RETENTION_HOURS: Final = 72
"""A weekend, and some more: how long a job may be down, and its epoch still be prepared again out of the topic."""

_HOUR_MS: Final = 3_600_000
_LEAST_MS: Final = LEAST_RETENTION_HOURS * _HOUR_MS
_OLDEST: Final = ("message.timestamp.before.max.ms", "message.timestamp.difference.max.ms")
"""The age of the oldest timestamp that brokers take from a producer; the second one until Kafka 3.6."""

_NO_LIMIT: Final = "-1"


def why_not(config: KafkaConfig, settings: Mapping[str, str], schema: pa.Schema) -> str | None:
    """Return why a copy of the rows is kept; None if the topic is enough. ``settings`` are the topic's, by their names.

    Whatever is not known speaks for the copy.
    """
    if config.spool is not None:
        return f"spool={config.spool}"
    if config.topic is None:
        return "each row names its topic"
    return _why_not_for_long(settings, dated=_are_dated(config, schema))


def where(config: KafkaConfig, settings: Mapping[str, str], schema: pa.Schema) -> str:
    """Return, in words, where rows are kept until their epoch is done."""
    reason = why_not(config, settings, schema)
    if reason is None:
        return "in the topic itself until their epoch is done: there is no other copy"
    return f"{'in the spool' if config.is_redone else 'nowhere'} until their epoch is done: {reason}"


def _why_not_for_long(settings: Mapping[str, str], *, dated: bool) -> str | None:
    if settings.get("cleanup.policy") != "delete":
        return f"cleanup.policy = {settings.get('cleanup.policy')}"
    if settings.get("unclean.leader.election.enable") != "false":
        return f"unclean.leader.election.enable = {settings.get('unclean.leader.election.enable')}"
    if settings.get("retention.bytes") != _NO_LIMIT:
        return f"retention.bytes = {settings.get('retention.bytes')}: other rows may soon take their place"
    return _too_soon(settings, dated=dated)


def _too_soon(settings: Mapping[str, str], *, dated: bool) -> str | None:
    hours = _retention_hours(settings)
    if hours is not None and hours < LEAST_RETENTION_HOURS:
        return f"retention.ms = {settings.get('retention.ms')} is less than {LEAST_RETENTION_HOURS} hours"
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return None
    if hours is not None and dated:
        return "the rows bring their own timestamps, by which retention.ms may delete them at once"
    # records are appended again with the timestamps that they had
    too_old = (f"{name} = {age}" for name in _OLDEST if (age := settings.get(name)) and int(age) < _LEAST_MS)
    return next(too_old, None)


def _retention_hours(settings: Mapping[str, str]) -> float | None:
    """Return for how long records are kept; None if for ever."""
    told = settings.get("retention.ms", "0")
    return None if told == _NO_LIMIT else int(told) / _HOUR_MS


def _are_dated(config: KafkaConfig, schema: pa.Schema) -> bool:
    return any(column.endswith("AS `timestamp`") for column in row_mapping.columns(config, "row", schema))
