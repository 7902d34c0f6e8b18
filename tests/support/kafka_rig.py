"""A pipeline from one topic into another, on a broker of its own, and what the Kafka failure tests do to it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer
from harness import Harness, make_topic
from kafka.admin import KafkaAdminClient

from epochsink.identity import PREFIX
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from epochsink_devkit.history import Report
    from epochsink_devkit.services import KafkaService

ROWS_FED: Final = 60
"""Rows added to each of the two source partitions before a start: two epochs."""
_ANSWER_SECONDS: Final = 30.0


class KafkaRig:
    """The harness, the broker that holds source and sink, and a reader for questions outside the history."""

    def __init__(self, harness: Harness, broker: KafkaService, topic: str) -> None:
        self.harness = harness
        self.broker = broker
        self.reader = KafkaReader(broker.bootstrap_servers, topic)

    def restart_with(self, crash: str, *, attempts: int = 1, tasks: int = 0) -> None:
        """Feed, start, and die at a failpoint."""
        self.harness.feed(ROWS_FED)
        self.harness.crash_at(crash, attempts=attempts, tasks=tasks)

    def kill_broker(self) -> None:
        """SIGKILL to the broker, which comes back on the same port and data."""
        self.harness.log.write("killed", what="broker", pid=self.broker.pid)
        self.broker.kill()
        self.broker.start()

    def lose_open(self) -> list[str]:
        """Let the broker abort every open transaction, by taking its id as a zombie does; return the ids."""
        admin = KafkaAdminClient(bootstrap_servers=self.broker.bootstrap_servers)
        try:
            listings = admin.list_transactions(state_filters=["Ongoing"]).values()
        finally:
            admin.close()
        names = [one.transactional_id for listed in listings for one in listed]
        lost = [name for name in names if name.startswith(f"{PREFIX}.")]
        for name in lost:
            settings = {"bootstrap.servers": self.broker.bootstrap_servers, "transactional.id": name}
            Producer(settings).init_transactions(_ANSWER_SECONDS)
        self.harness.log.write("killed", what=f"transactions {lost}", pid=0)
        return lost

    def is_clean(self) -> Report:
        """Drain, and have the checker find nothing."""
        self.harness.drain()
        return self.was_clean()

    def was_clean(self) -> Report:
        """Have the checker find nothing."""
        report = self.harness.report()
        assert report.clean, str(report)
        return report


@contextmanager
def pipeline_into_kafka(
    folder: Path, broker: KafkaService, settings: Mapping[str, str] | None = None, **options: Any
) -> Iterator[KafkaRig]:
    """Make a pipeline from a topic of two partitions into another; ``options`` are the sink's, ``settings`` Spark's."""
    servers = broker.bootstrap_servers
    make_topic(servers, "sink")
    sink = {"kind": "Kafka", "bootstrap_servers": servers, "topic": "sink", "key": "cast(key AS string)", **options}
    with Harness(folder, broker, "source", sinks={"topic": sink}, settings=dict(settings or {})) as harness:
        harness.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, "sink"))
        yield KafkaRig(harness, broker, "sink")
