"""Kafka topics as exactly-once sinks."""

from epochsink.kafka.config import NewTopic
from epochsink.kafka.sink import Kafka

__all__ = ["Kafka", "NewTopic"]
