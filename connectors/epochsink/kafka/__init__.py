"""Kafka topics as exactly-once sinks."""

from epochsink.kafka.avro import Avro
from epochsink.kafka.config import NewTopic
from epochsink.kafka.sink import Kafka

__all__ = ["Avro", "Kafka", "NewTopic"]
