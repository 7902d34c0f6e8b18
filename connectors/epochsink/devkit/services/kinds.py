"""List the services by name, create them, and fetch what they need."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from epochsink.devkit.services import (
    LocalElasticsearch,
    LocalHdfs,
    LocalKafka,
    LocalPostgres,
    LocalRegistry,
    LocalS3,
    versions,
)
from epochsink.devkit.services.artifacts import fetch
from epochsink.devkit.services.containers import ContainerElasticsearch, ContainerKafka, ContainerPostgres
from epochsink.devkit.services.java import java
from epochsink.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from epochsink.devkit.services.service import Service


class Kind(StrEnum):
    """A service's name on the command line."""

    KAFKA = "kafka"
    POSTGRES = "postgres"
    ELASTICSEARCH = "elasticsearch"
    HDFS = "hdfs"
    S3 = "s3"
    REGISTRY = "registry"


SINKS: Final = (Kind.KAFKA, Kind.POSTGRES, Kind.ELASTICSEARCH)
"""The services to start if no name is given: those that a pipeline writes to."""


def make(kind: Kind, *, docker: bool) -> Service:
    """Return a service of this kind, not started."""
    local: dict[Kind, Callable[[], Service]] = {
        Kind.KAFKA: LocalKafka,
        Kind.POSTGRES: LocalPostgres,
        Kind.ELASTICSEARCH: LocalElasticsearch,
        Kind.HDFS: LocalHdfs,
        Kind.S3: LocalS3,
        Kind.REGISTRY: LocalRegistry,
    }
    contained: dict[Kind, Callable[[], Service]] = {
        Kind.KAFKA: ContainerKafka,
        Kind.POSTGRES: ContainerPostgres,
        Kind.ELASTICSEARCH: ContainerElasticsearch,
    }
    if docker and kind not in contained:
        raise ServiceError(f"{kind} runs as plain processes only", hint=f"epochsink services up {kind}")
    return (contained if docker else local)[kind]()


def prefetch(kinds: list[Kind]) -> None:
    """Fetch what plain processes of these kinds need, and show the progress.

    Raises `ServiceError` before the first download if no Java on this machine can run one of them.
    """
    for kind in kinds:
        _require_java(kind)
    for kind in kinds:
        for bundle in _bundles(kind):
            fetch(bundle)


def _require_java(kind: Kind) -> None:
    if kind is not Kind.ELASTICSEARCH:
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


def _bundles(kind: Kind) -> list[versions.Bundle]:
    match kind:
        case Kind.KAFKA:
            return [versions.KAFKA_BUNDLE]
        case Kind.POSTGRES:
            return [versions.postgres_bundle()]
        case Kind.ELASTICSEARCH:
            release = versions.elasticsearch()
            return [release.bundle, release.http_bundle]
        case Kind.HDFS:
            return [versions.hdfs_bundle()]
        case Kind.S3:
            return []
        case Kind.REGISTRY:
            return [versions.REGISTRY_BUNDLE]
