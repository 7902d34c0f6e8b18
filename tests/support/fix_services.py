"""Services for tests: one of each per session, private ones to break, fresh names in the shared ones."""

from __future__ import annotations

import contextlib
import os
import uuid
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import pytest

from epochsink_devkit.services import (
    LocalElasticsearch,
    LocalHdfs,
    LocalKafka,
    LocalOpenSearch,
    LocalOpenSearch3,
    LocalPostgres,
    LocalRegistry,
    LocalS3,
)
from epochsink_devkit.services.containers import ContainerElasticsearch, ContainerKafka, ContainerPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService, Service

    ServiceType = TypeVar("ServiceType", bound=Service)


MAKERS: Final = frozenset({"make_kafka", "make_postgres", "make_elasticsearch"})


class PrivateKafka(Protocol):
    """Starts a broker of the test's own; dots in a property's name are written as they are: `**{"a.b": 1}`."""

    def __call__(self, **settings: str | int | bool) -> KafkaService: ...


class PrivatePostgres(Protocol):
    """Starts a PostgreSQL server of the test's own."""

    def __call__(self, **settings: str | int | bool) -> PostgresService: ...


class PrivateElasticsearch(Protocol):
    """Starts an Elasticsearch node of the test's own."""

    def __call__(self, **settings: str | int | bool) -> ElasticsearchService: ...


class FreshName(Protocol):
    """Makes a name that nothing else uses; `stem` makes it readable in logs."""

    def __call__(self, stem: str = "t") -> str: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docker", action="store_true", help="run the services in containers, not as plain processes")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which tests talk to a container."""
    if item.config.getoption("docker") and not MAKERS.isdisjoint(getattr(item, "fixturenames", ())):
        item.user_properties.append(("containers", True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests have passed on containers; the others of the run need no service."""
    if config.getoption("docker"):
        passed = [one for one in terminalreporter.getreports("passed") if ("containers", True) in one.user_properties]
        terminalreporter.write_line(f"containers: {len(passed)} tests have passed on services in containers")


@pytest.fixture(scope="session")
def make_kafka(request: pytest.FixtureRequest) -> Callable[..., KafkaService]:
    """Return what makes brokers, as `--docker` says."""
    return ContainerKafka if request.config.getoption("docker") else partial(LocalKafka, short_lived=True)


@pytest.fixture(scope="session")
def make_postgres(request: pytest.FixtureRequest) -> Callable[..., PostgresService]:
    """Return what makes PostgreSQL servers, as `--docker` says."""
    return ContainerPostgres if request.config.getoption("docker") else LocalPostgres


@pytest.fixture(scope="session")
def make_elasticsearch(request: pytest.FixtureRequest) -> Callable[..., ElasticsearchService]:
    """Return what makes Elasticsearch nodes, as `--docker` says."""
    return (
        ContainerElasticsearch if request.config.getoption("docker") else partial(LocalElasticsearch, short_lived=True)
    )


@pytest.fixture(scope="session")
def postgres(make_postgres: Callable[..., PostgresService]) -> Iterator[PostgresService]:
    """Return the session's PostgreSQL, started by the first test that asks. Do not stop it: others use it."""
    with make_postgres() as service:
        yield service


@pytest.fixture(scope="session")
def elasticsearch(make_elasticsearch: Callable[..., ElasticsearchService]) -> Iterator[ElasticsearchService]:
    """Return the session's Elasticsearch, started by the first test that asks. Do not stop it: others use it."""
    with make_elasticsearch() as service:
        yield service


@pytest.fixture(scope="session")
def opensearch() -> Iterator[ElasticsearchService]:
    """Return the session's OpenSearch, started by the first test that asks. Do not stop it: others use it.

    Version 2.19, unless `make test ON=opensearch OPENSEARCH=3` runs the tests.
    """
    newest = os.environ.get("EPOCHSINK_TESTS_ON_OPENSEARCH") == "3"
    with (LocalOpenSearch3 if newest else LocalOpenSearch)(short_lived=True) as service:
        yield service


@pytest.fixture(scope="session")
def hdfs() -> Iterator[LocalHdfs]:
    """Return the session's HDFS, started by the first test that asks. Do not stop it: others use it."""
    with LocalHdfs() as service:
        yield service


@pytest.fixture(scope="session")
def s3() -> Iterator[LocalS3]:
    """Return the session's S3 API, started by the first test that asks. Do not stop it: others use it."""
    with LocalS3() as service:
        yield service


@pytest.fixture(scope="session")
def registry() -> Iterator[LocalRegistry]:
    """Return the session's schema registry, started by the first test that asks. Do not stop it: others use it."""
    with LocalRegistry() as service:
        yield service


@pytest.fixture
def private_kafka(make_kafka: Callable[..., KafkaService]) -> Iterator[PrivateKafka]:
    """Brokers for this test alone, to stop, kill and pause; removed at its end."""
    with _private(make_kafka) as start:
        yield start


@pytest.fixture
def private_postgres(make_postgres: Callable[..., PostgresService]) -> Iterator[PrivatePostgres]:
    """PostgreSQL servers for this test alone, to stop, kill and pause; removed at its end."""
    with _private(make_postgres) as start:
        yield start


@pytest.fixture
def private_elasticsearch(
    make_elasticsearch: Callable[..., ElasticsearchService],
) -> Iterator[PrivateElasticsearch]:
    """Elasticsearch nodes for this test alone, to stop, kill and pause; removed at its end."""
    with _private(make_elasticsearch) as start:
        yield start


@pytest.fixture
def fresh_topic() -> FreshName:
    """Names of topics that do not exist yet."""
    return _fresh


@pytest.fixture
def fresh_table() -> FreshName:
    """Names of tables that do not exist yet; they need no quoting."""
    return _fresh


@pytest.fixture
def fresh_schema() -> FreshName:
    """Names of schemas that do not exist yet; they need no quoting."""
    return _fresh


@pytest.fixture
def fresh_index() -> FreshName:
    """Names of indices that do not exist yet."""
    return _fresh


def _fresh(stem: str = "t") -> str:
    return f"{stem}_{uuid.uuid4().hex[:10]}"


@contextlib.contextmanager
def _private(make: Callable[..., ServiceType]) -> Iterator[Callable[..., ServiceType]]:
    with contextlib.ExitStack() as stack:

        def start(**settings: str | int | bool) -> ServiceType:
            service = make(settings)
            stack.callback(service.close)
            service.start()
            return service

        yield start
