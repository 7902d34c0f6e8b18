"""Kafka, PostgreSQL and Elasticsearch for development, tests and the demo, without Docker or with it."""

from epochsink.services.artifacts import spark_coordinates, spark_ivy_settings, spark_packages
from epochsink.services.elasticsearch import LocalElasticsearch
from epochsink.services.kafka import LocalKafka
from epochsink.services.ports import free_port
from epochsink.services.postgres import LocalPostgres
from epochsink.services.service import ElasticsearchService, KafkaService, PostgresService, Service

__all__ = [
    "ElasticsearchService",
    "KafkaService",
    "LocalElasticsearch",
    "LocalKafka",
    "LocalPostgres",
    "PostgresService",
    "Service",
    "free_port",
    "spark_coordinates",
    "spark_ivy_settings",
    "spark_packages",
]
