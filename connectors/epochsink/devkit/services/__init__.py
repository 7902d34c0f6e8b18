"""Kafka, PostgreSQL, Elasticsearch, HDFS, an S3 API and a schema registry for development, tests and the demo."""

from epochsink.devkit.services.artifacts import spark_coordinates, spark_ivy_settings, spark_packages
from epochsink.devkit.services.elasticsearch import LocalElasticsearch
from epochsink.devkit.services.hdfs import LocalHdfs
from epochsink.devkit.services.kafka import LocalKafka
from epochsink.devkit.services.ports import free_port
from epochsink.devkit.services.postgres import LocalPostgres
from epochsink.devkit.services.registry import LocalRegistry
from epochsink.devkit.services.s3 import LocalS3
from epochsink.devkit.services.service import ElasticsearchService, KafkaService, PostgresService, Service

__all__ = [
    "ElasticsearchService",
    "KafkaService",
    "LocalElasticsearch",
    "LocalHdfs",
    "LocalKafka",
    "LocalPostgres",
    "LocalRegistry",
    "LocalS3",
    "PostgresService",
    "Service",
    "free_port",
    "spark_coordinates",
    "spark_ivy_settings",
    "spark_packages",
]
