"""The services by name: how each is made, and what it needs fetched beforehand."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from epochsink.devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres, versions
from epochsink.devkit.services.artifacts import fetch
from epochsink.devkit.services.containers import ContainerElasticsearch, ContainerKafka, ContainerPostgres

if TYPE_CHECKING:
    from collections.abc import Callable

    from epochsink.devkit.services.service import Service


class Kind(StrEnum):
    """A service's name on the command line."""

    KAFKA = "kafka"
    POSTGRES = "postgres"
    ELASTICSEARCH = "elasticsearch"


def make(kind: Kind, *, docker: bool) -> Service:
    """Return a service of this kind, not started."""
    local: dict[Kind, Callable[[], Service]] = {
        Kind.KAFKA: LocalKafka,
        Kind.POSTGRES: LocalPostgres,
        Kind.ELASTICSEARCH: LocalElasticsearch,
    }
    contained: dict[Kind, Callable[[], Service]] = {
        Kind.KAFKA: ContainerKafka,
        Kind.POSTGRES: ContainerPostgres,
        Kind.ELASTICSEARCH: ContainerElasticsearch,
    }
    return (contained if docker else local)[kind]()


def prefetch(kinds: list[Kind]) -> None:
    """Fetch what plain processes of these kinds need, where the user can see the progress."""
    for kind in kinds:
        for bundle in _bundles(kind):
            fetch(bundle)


def _bundles(kind: Kind) -> list[versions.Bundle]:
    match kind:
        case Kind.KAFKA:
            return [versions.KAFKA_BUNDLE]
        case Kind.POSTGRES:
            return [versions.postgres_bundle()]
        case Kind.ELASTICSEARCH:
            release = versions.elasticsearch()
            return [release.bundle, release.http_bundle]
