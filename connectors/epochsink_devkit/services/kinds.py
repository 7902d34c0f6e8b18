"""List the services by name, create them, and fetch what they need."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from epochsink.errors import ServiceError
from epochsink_devkit.services import (
    LocalElasticsearch,
    LocalHdfs,
    LocalKafka,
    LocalOpenSearch,
    LocalPostgres,
    LocalRegistry,
    LocalS3,
    versions,
)
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.containers import ContainerElasticsearch, ContainerKafka, ContainerPostgres
from epochsink_devkit.services.java import java
from epochsink_devkit.services.service import Service


class ServiceKind(StrEnum):
    """A service's name on the command line."""

    KAFKA = "kafka"
    POSTGRES = "postgres"
    ELASTICSEARCH = "elasticsearch"
    OPENSEARCH = "opensearch"
    HDFS = "hdfs"
    S3 = "s3"
    REGISTRY = "registry"


SINKS: Final = (ServiceKind.KAFKA, ServiceKind.POSTGRES, ServiceKind.ELASTICSEARCH)
"""The services to start if no name is given: those that a pipeline writes to."""


def make(kind: ServiceKind, *, docker: bool) -> Service:
    """Return a service of this kind, not started."""
    local: dict[ServiceKind, Callable[[], Service]] = {
        ServiceKind.KAFKA: LocalKafka,
        ServiceKind.POSTGRES: LocalPostgres,
        ServiceKind.ELASTICSEARCH: LocalElasticsearch,
        ServiceKind.OPENSEARCH: LocalOpenSearch,
        ServiceKind.HDFS: LocalHdfs,
        ServiceKind.S3: LocalS3,
        ServiceKind.REGISTRY: LocalRegistry,
    }
    contained: dict[ServiceKind, Callable[[], Service]] = {
        ServiceKind.KAFKA: ContainerKafka,
        ServiceKind.POSTGRES: ContainerPostgres,
        ServiceKind.ELASTICSEARCH: ContainerElasticsearch,
    }
    if docker and kind not in contained:
        raise ServiceError(f"{kind} runs as plain processes only", hint=f"epochsink services up {kind}")
    return (contained if docker else local)[kind]()


def prefetch(kinds: list[ServiceKind]) -> None:
    """Fetch what plain processes of these kinds need, and show the progress.

    Raises `ServiceError` before the first download if no Java on this machine can run one of them.
    """
    for kind in kinds:
        _require_java(kind)
    for kind in kinds:
        for bundle in _bundles(kind):
            fetch(bundle)


def _require_java(kind: ServiceKind) -> None:
    if kind is not ServiceKind.ELASTICSEARCH:
        java()
        return
    release = versions.elasticsearch()
    try:
        java(release.java_minimum, release.java_newest)
    except ServiceError as unfit:
        older = versions.ELASTICSEARCH[min(versions.ELASTICSEARCH)]
        if release is older:
            raise
        raise ServiceError(
            f"Elasticsearch {release.version}, the server for the installed client, cannot run here: {unfit.message}",
            hint=f"{unfit.hint}; or install the client of a server that runs on Java {older.java_minimum}: pip install "
            f"'elasticsearch<{release.version.partition('.')[0]}'",
        ) from unfit


def _bundles(kind: ServiceKind) -> list[versions.Bundle]:
    match kind:
        case ServiceKind.KAFKA:
            return [versions.KAFKA_BUNDLE]
        case ServiceKind.POSTGRES:
            return [versions.postgres_bundle()]
        case ServiceKind.ELASTICSEARCH | ServiceKind.OPENSEARCH:
            of_opensearch = kind is ServiceKind.OPENSEARCH
            release = versions.OPENSEARCH[LocalOpenSearch.major] if of_opensearch else versions.elasticsearch()
            return [release.bundle, release.http_bundle]
        case ServiceKind.HDFS:
            return [versions.hdfs_bundle()]
        case ServiceKind.S3:
            return []
        case ServiceKind.REGISTRY:
            return [versions.REGISTRY_BUNDLE]
