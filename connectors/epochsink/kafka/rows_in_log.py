"""Decide whether the topic itself keeps an epoch's rows until the epoch is done, and note where they begin.

Records of an aborted transaction stay in the log as long as those of a committed one. So no copy is needed if only
retention by time deletes them, and late enough.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.kafka import row_mapping
from epochsink.kafka.committable import KafkaCommittable, WrittenPartition
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import Epoch

log = logging.getLogger("epochsink.kafka")

LEAST_RETENTION_HOURS: Final = 72
"""The least retention of the topic. A job that is down over a weekend can still prepare its epoch again."""

_HOUR_MS: Final = 3_600_000
_LEAST_MS: Final = LEAST_RETENTION_HOURS * _HOUR_MS
_OLDEST: Final = ("message.timestamp.before.max.ms", "message.timestamp.difference.max.ms")
"""The age of the oldest timestamp that brokers accept; brokers before Kafka 3.6 know only the second name."""

_NO_LIMIT: Final = "-1"


def why_not(config: KafkaConfig, settings: Mapping[str, str], schema: pa.Schema) -> str | None:
    """Return why the topic does not keep the rows; None if it does. ``settings`` holds the topic's settings, by name.

    If a setting is not known, the topic does not keep them.
    """
    if config.spool is not None:
        return f"spool={config.spool}"
    if config.topic is None:
        return "each row names its topic"
    return _why_not_for_long(settings, dated="timestamp" in row_mapping.fields(config, schema))


def why_not_letters(settings: Mapping[str, str]) -> str | None:
    """Return why the topic of dead letters does not keep them, as `why_not`. They have no timestamps of their own."""
    why = _why_not_for_long(settings, dated=False)
    return None if why is None else f"the topic of dead letters has {why}"


def where(config: KafkaConfig, settings: Mapping[str, str], schema: pa.Schema) -> str:
    """Return, in words, where rows are kept until their epoch is done."""
    reason = why_not(config, settings, schema)
    if reason is None:
        return "in the topic itself until their epoch is done: there is no other copy"
    return f"{'in the spool' if config.is_redone else 'nowhere'} until their epoch is done: {reason}"


def _why_not_for_long(settings: Mapping[str, str], *, dated: bool) -> str | None:
    # the rows of an aborted transaction must stay until they are copied: each of these settings may lose some of them
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
    # the broker dates records as they arrive, so that neither limit on timestamps can strike
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return None
    if hours is not None and dated:
        return "the rows bring their own timestamps, by which retention.ms may delete them at once"
    # batches are appended again with their old timestamps
    too_old = (f"{name} = {age}" for name in _OLDEST if (age := settings.get(name)) and int(age) < _LEAST_MS)
    return next(too_old, None)


def _retention_hours(settings: Mapping[str, str]) -> float | None:
    """Return for how many hours records are kept; None for ever."""
    setting = settings.get("retention.ms", "0")
    return None if setting == _NO_LIMIT else int(setting) / _HOUR_MS


class _Noted(NamedTuple):
    attempt: str
    schema: pa.Schema
    topic_ids: Mapping[str, str]
    places: tuple[WrittenPartition, ...]


class _Begun(NamedTuple):
    number: int
    at: float


class LogEnds:
    """Notes the ends of the topic's partitions before an attempt, if the topic keeps the rows. Used by one thread.

    If there are dead letters, their topic must keep them as well. The topics' settings may change, so each attempt and
    each vote reads them.

    If the broker aborts a transaction while its task writes, the task can continue only with a copy. So if an attempt
    takes longer than the transaction timeout and fails, copies are kept for the rest of the run.
    """

    def __init__(self, config: KafkaConfig, cluster: KafkaServer) -> None:
        self._config = config
        self._cluster = cluster
        self._topics = [topic for topic in (config.topic, config.letters_topic) if topic is not None]
        self._noted: _Noted | None = None
        self._said = ""
        self._replicas_needed = 0
        self._begun: _Begun | None = None
        self._outlasted = False

    def note(self, epoch: Epoch, schema: pa.Schema, transaction_seconds: float) -> bool:
        """Note the topic's ends; return whether the topic keeps the rows of this attempt, so that no copy is needed.

        ``transaction_seconds`` is the transaction timeout of tasks.
        """
        # what was noted for an earlier attempt is void
        self._noted = None
        if self._has_outlasted(epoch, transaction_seconds):
            return False
        logs = [TopicLog(self._cluster, topic) for topic in self._topics]
        try:
            # mostly the answer is that of the epoch before: then the ends are needed
            beside = [] if self._said else [each.ends for each in logs]
            why, *numbers = self._cluster.beside(lambda: self._why_not(schema), *beside)
            if why is not None:
                return False
            ends = dict(zip(self._topics, numbers or [each.ends() for each in logs], strict=True))
        except (Unreachable, Refused) as failure:
            log.info("epoch %d is spooled: topic %s could not be read: %s", epoch.number, self._named, failure)
            return False
        places = [
            WrittenPartition(topic, *place) for topic, offsets in ends.items() for place in sorted(offsets.items())
        ]
        self._noted = _Noted(epoch.attempt, schema, {each.topic: each.topic_id for each in logs}, tuple(places))
        return True

    @property
    def _named(self) -> str:
        return "' or '".join(self._topics)

    def added(self, epoch: Epoch, parts: Sequence[KafkaCommittable]) -> list[KafkaCommittable]:
        """Return the tasks' parts with the ends that `note` noted for their attempt.

        Raises `PrepareFailed` if the topic was created again. `require_kept` has to follow.
        """
        if self._noted is None or self._noted.attempt != epoch.attempt:
            return list(parts)
        # before the settings: those of a new topic with this name prove nothing
        noted = self._noted.topic_ids
        if other := {name for part in parts for name, known in part.topics.items() if known != noted.get(name)}:
            raise PrepareFailed(
                f"epoch {epoch.number}: topic '{', '.join(sorted(other))}' was deleted and created again while the "
                "epoch was written",
                hint="nothing is recorded yet: Spark runs the epoch again",
            )
        # a part without letters is not looked for in their topic
        return [
            replace(part, kept_in_topic=True, places=tuple(at for at in self._noted.places if at.topic in part.topics))
            for part in parts
        ]

    def require_kept(self, epoch: Epoch) -> None:
        """Raise `PrepareFailed` if the topic no longer keeps the rows of an epoch whose tasks have ended."""
        if self._noted is None:
            return
        try:
            why = self._why_not(self._noted.schema)
        except (Unreachable, Refused) as failure:
            raise PrepareFailed(
                f"epoch {epoch.number}: the settings of topic '{self._named}' could not be read: {failure}",
                hint="nothing is recorded yet: Spark runs the epoch again",
            ) from failure
        if why is not None:
            raise PrepareFailed(
                f"epoch {epoch.number}: topic '{self._named}' may no longer keep the rows that were written: {why}",
                hint="nothing is recorded yet: Spark runs the epoch again, with a copy of its rows in the spool",
            )

    def _has_outlasted(self, epoch: Epoch, transaction_seconds: float) -> bool:
        before, now = self._begun, self._cluster.clock.monotonic()
        self._begun = _Begun(epoch.number, now)
        # the same epoch again: the attempt before has failed
        if before is not None and before.number == epoch.number and now - before.at > transaction_seconds:
            self._outlasted = True
            log.warning(
                "epoch %d: an attempt took longer than the transaction timeout (%g s) and failed: from now on rows are "
                "also kept in the spool, so that tasks may take longer. If all epochs are this large, raise "
                "transaction_timeout=, or make epochs smaller",
                epoch.number,
                transaction_seconds,
            )
        return self._outlasted

    def _compare_replicas_needed(self, settings: Mapping[str, str]) -> None:
        """Warn if somebody has lowered min.insync.replicas since the last look: `check` saw the higher value."""
        needed = int(settings.get("min.insync.replicas", 1))
        if needed < self._replicas_needed:
            log.warning(
                "topic %s: min.insync.replicas was lowered from %d to %d while the query runs: an acknowledged epoch "
                "may be lost with %d broker(s); nothing is lost by now; raise it again, or accept the risk",
                self._config.topic,
                self._replicas_needed,
                needed,
                needed,
            )
        self._replicas_needed = needed

    def _why_not(self, schema: pa.Schema) -> str | None:
        settings: Mapping[str, str] = {}
        if self._config.spool is None and self._config.topic is not None:
            settings = self._cluster.topic_settings(self._config.topic)
            self._compare_replicas_needed(settings)
        why = why_not(self._config, settings, schema)
        if (why or "") != self._said:
            self._said = why or ""
            log.info("topic %s: rows are kept %s", self._config.topic, where(self._config, settings, schema))
        if why is None and (letters := self._config.letters_topic) is not None:
            why = why_not_letters(self._cluster.topic_settings(letters))
        return why
