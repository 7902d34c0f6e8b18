"""Where a topic's log ended before an attempt began to write: its rows are kept from there on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from epochsink.errors import PrepareFailed
from epochsink.kafka import preflight, rows_in_log
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.topic_log import TopicLog

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import KafkaCommittable
    from epochsink.kafka.config import KafkaConfig
    from epochsink.sink import Epoch

log = logging.getLogger("epochsink.kafka")

_SETTINGS_SECONDS: Final = 60.0
"""For how long the topic's settings are believed."""


class _Noted(NamedTuple):
    attempt: str
    topic_id: str
    ends: tuple[int, ...]


class _Begun(NamedTuple):
    number: int
    at: float


class LogEnds:
    """Notes the ends for one attempt at a time, where the topic keeps the rows. Used by the stream's thread alone.

    A task cannot go on in the topic when its transaction has ended under its hands, but with a copy it can. So once an
    attempt at an epoch has failed that took longer than its transactions may, copies are kept for the rest of the run.
    """

    def __init__(self, config: KafkaConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self._log = TopicLog(cluster, config.topic or "")
        self._noted: _Noted | None = None
        self._settings: Mapping[str, str] = {}
        self._asked_at = float("-inf")
        self._said = ""
        self._begun: _Begun | None = None
        self._outlasted = False

    def note(self, epoch: Epoch, schema: pa.Schema, transaction_seconds: float) -> bool:
        """Note where the topic ends now; return whether the rows that follow are kept there and need no copy.

        ``transaction_seconds`` is how long the brokers keep a task's transaction open.
        """
        self._noted = None
        if self._has_outlasted(epoch, transaction_seconds):
            return False
        try:
            if self._why_not(schema) is not None:
                return False
            ends = self._log.ends()
        except (Unreachable, Refused) as failure:
            log.info(
                "epoch %d is spooled: where topic %s ends is not known: %s", epoch.number, self._log.topic, failure
            )
            return False
        if len(ends) > rows_in_log.MOST_PARTITIONS:
            return False
        self._noted = _Noted(epoch.attempt, self._log.topic_id, tuple(ends[partition] for partition in sorted(ends)))
        return True

    def added(self, epoch: Epoch, part: KafkaCommittable) -> KafkaCommittable:
        """Return a task's part with what was noted for its attempt. Raises `PrepareFailed` if the topic is another."""
        if self._noted is None or self._noted.attempt != epoch.attempt:
            return part
        if set(part.topics.values()) != {self._noted.topic_id}:
            raise PrepareFailed(
                f"epoch {epoch.number}: topic '{self._log.topic}' was deleted and created again while the epoch was "
                "written",
                hint="nothing is recorded yet: Spark runs the epoch again",
            )
        return replace(part, log_from=self._noted.ends)

    def _has_outlasted(self, epoch: Epoch, transaction_seconds: float) -> bool:
        before, now = self._begun, time.monotonic()
        self._begun = _Begun(epoch.number, now)
        if before is not None and before.number == epoch.number and now - before.at > transaction_seconds:
            self._outlasted = True
            log.warning(
                "epoch %d: an attempt has failed that took longer than a transaction may (%g s): from now on rows are "
                "kept in the spool, with which tasks outlive their transactions. Where all epochs are so large, raise "
                "transaction_timeout=, or make them smaller",
                epoch.number,
                transaction_seconds,
            )
        return self._outlasted

    def _why_not(self, schema: pa.Schema) -> str | None:
        if self._config.spool is None and self._config.topic is not None:
            self._learn_settings(self._config.topic)
        why = rows_in_log.why_not(self._config, self._settings, schema)
        if (why or "") != self._said:
            self._said = why or ""
            log.info(
                "topic %s: rows are kept %s", self._log.topic, rows_in_log.where(self._config, self._settings, schema)
            )
        return why

    def _learn_settings(self, topic: str) -> None:
        if time.monotonic() - self._asked_at > _SETTINGS_SECONDS:
            self._settings = preflight.topic_settings(self._cluster, topic)
            self._asked_at = time.monotonic()
