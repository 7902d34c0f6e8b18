"""Kafka topics as exactly-once sinks."""

from epochsink.kafka.config import Kafka, NewTopic

__all__ = ["Kafka", "NewTopic"]
