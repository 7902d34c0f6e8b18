"""The environments under test, and services that all of them use."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from epochsink_devkit.services import LocalElasticsearch, versions
from versions.environments import CHOSEN, KAFKA_SOURCE, Environment, all_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from epochsink_devkit.services import ElasticsearchService


@pytest.fixture(scope="session")
def make_elasticsearch() -> Callable[..., ElasticsearchService]:
    """Return what makes nodes of the newest version, to which clients of both versions speak."""
    patched = pytest.MonkeyPatch()
    patched.setattr(versions, "elasticsearch", lambda: versions.ELASTICSEARCH[max(versions.ELASTICSEARCH)])
    return partial(LocalElasticsearch, short_lived=True)


@pytest.fixture(scope="session", params=CHOSEN)
def with_postgres_only(request: pytest.FixtureRequest) -> Environment:
    """Return an environment into which nothing was installed but the wheel with its extras [spark,postgres]."""
    return _chosen(request.param)


@pytest.fixture(scope="session")
def environment(with_postgres_only: Environment) -> Environment:
    """Return the environment with the extras of all three sinks."""
    with_postgres_only.install("kafka,postgres,elasticsearch")
    return with_postgres_only


@pytest.fixture(scope="session", params=[name for name in CHOSEN if name == KAFKA_SOURCE])
def with_kafka_source(request: pytest.FixtureRequest) -> Environment:
    """Return the environment of the PySpark whose Kafka source is tried, with the extra [demo]."""
    made = _chosen(request.param)
    made.install("demo")
    return made


def _chosen(name: str) -> Environment:
    wheel, folder = (Path(os.environ[each]).absolute() for each in ("EPOCHSINK_WHEEL", "EPOCHSINK_ENVIRONMENTS"))
    return all_in(wheel, folder)[name]
