"""Kafka topics as exactly-once sinks."""

from epochsink.kafka.sink import Kafka, NewTopic

__all__ = ["Kafka", "NewTopic"]
