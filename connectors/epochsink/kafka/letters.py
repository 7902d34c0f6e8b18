"""Show an operator the dead letters in a topic. Kafka can neither delete one record nor write it elsewhere instead."""

from __future__ import annotations

import json
import time
import uuid
from datetime import UTC, datetime
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from epochsink.errors import ConfigurationError
from epochsink.identity import identity_key
from epochsink.kafka.client_options import TRANSLATION
from epochsink.kafka.errors import Unreachable
from epochsink.sink import Letter, Letters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Never

    from epochsink.kafka.config import KafkaConfig
    from epochsink.sink import Chosen, Identity

_POLL_SECONDS: Final = 0.5


class KafkaLetters(Letters):
    """The letters of one sink in the topic of dead letters ``topic``, as read_committed readers see them.

    A letter's id is its partition and its offset. Every method reads the whole topic.
    """

    def __init__(self, config: KafkaConfig, identity: Identity, topic: str) -> None:
        self._config = config
        self._key = identity_key(identity)
        self._topic = topic

    def read(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        """Return the newest letters, by the time of writing."""
        return nlargest(limit, self._letters(chosen), key=lambda letter: letter.set_aside_at)

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters."""
        return sum(1 for _ in self._letters(chosen))

    def caution(self) -> str:
        """Return nothing: a retry is refused."""
        return ""

    def retry(self, chosen: Chosen) -> Never:
        """Refuse. A transaction can write the row, and cannot take the letter away: a second retry would double it."""
        del chosen
        raise ConfigurationError(
            f"dead letters in topic '{self._topic}' are not retried: Kafka cannot delete a letter together with the "
            "write of its row, so that a retry which is typed again would double the row",
            hint="take the rows from: epochsink letters list --json, and write those that are needed yourself",
        )

    def drop(self, chosen: Chosen) -> Never:
        """Refuse. Kafka deletes records only from the beginning of a partition, whosever they are."""
        del chosen
        raise ConfigurationError(
            f"dead letters in topic '{self._topic}' are not dropped one by one: Kafka deletes records only from the "
            "beginning of a partition",
            hint="let retention.ms of the topic delete them, or run kafka-delete-records.sh up to an offset",
        )

    def _letters(self, chosen: Chosen) -> Iterator[Letter]:
        for message in self._messages():
            headers = {name: (value or b"").decode() for name, value in message.headers() or ()}
            # several sinks, and other programs, may write to the topic
            if headers.get("key") != self._key or "error" not in headers:
                continue
            name, epoch = f"{message.partition()}-{message.offset()}", int(headers["epoch"])
            if (chosen.ids and name not in chosen.ids) or chosen.epoch not in {None, epoch}:
                continue
            at = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC).isoformat(timespec="milliseconds")
            yield Letter(name, epoch, "", headers["error"], json.loads(message.value()), at)

    def _messages(self) -> Iterator[Any]:
        """Yield the committed records of all partitions up to the last stable offsets. Raises `Unreachable`."""
        connection = {name: value for name, value in self._config.options.items() if name in TRANSLATION}
        reading = {
            "bootstrap.servers": self._config.bootstrap_servers,
            # without a group that the brokers would know: nothing is committed
            "group.id": f"epochsink.letters.{uuid.uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
        consumer = Consumer(connection | reading)
        try:
            known = consumer.list_topics(self._topic, timeout=self._config.timeout).topics[self._topic].partitions
            consumer.assign([TopicPartition(self._topic, partition, OFFSET_BEGINNING) for partition in known])
            waiting, arrived = set(known), time.monotonic()
            while waiting:
                message = consumer.poll(_POLL_SECONDS)
                if message is None:
                    if time.monotonic() - arrived > self._config.timeout:
                        raise self._unreachable("no record came")
                    continue
                arrived, error = time.monotonic(), message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name of it
                    waiting.discard(message.partition())
                elif not error.retriable():
                    raise self._unreachable(error.str())
        finally:
            consumer.close()

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(
            f"topic '{self._topic}' of {self._config.bootstrap_servers} could not be read: {why}",
            hint="check that all brokers run, and that the user may READ the topic",
        )
