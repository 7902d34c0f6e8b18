"""Kafka, PostgreSQL, Elasticsearch, OpenSearch, HDFS, an S3 API and a schema registry for development and tests."""

from epochsink_devkit.services.artifacts import spark_coordinates, spark_ivy_settings, spark_packages
from epochsink_devkit.services.elasticsearch import LocalElasticsearch
from epochsink_devkit.services.hdfs import LocalHdfs
from epochsink_devkit.services.kafka import LocalKafka
from epochsink_devkit.services.opensearch import LocalOpenSearch, LocalOpenSearch3
from epochsink_devkit.services.ports import free_port
from epochsink_devkit.services.postgres import LocalPostgres
from epochsink_devkit.services.registry import LocalRegistry
from epochsink_devkit.services.s3 import LocalS3
from epochsink_devkit.services.service import ElasticsearchService, KafkaService, PostgresService, Service

__all__ = [
    "ElasticsearchService",
    "KafkaService",
    "LocalElasticsearch",
    "LocalHdfs",
    "LocalKafka",
    "LocalOpenSearch",
    "LocalOpenSearch3",
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
