"""Kafka, PostgreSQL and Elasticsearch for development, tests and the demo, without Docker or with it."""

from epochsink.devkit.services.artifacts import spark_coordinates, spark_ivy_settings, spark_packages
from epochsink.devkit.services.elasticsearch import LocalElasticsearch
from epochsink.devkit.services.kafka import LocalKafka
from epochsink.devkit.services.ports import free_port
from epochsink.devkit.services.postgres import LocalPostgres
from epochsink.devkit.services.service import ElasticsearchService, KafkaService, PostgresService, Service

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
