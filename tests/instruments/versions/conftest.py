"""The environments under test, and services that all of them use."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from epochsink_devkit.services import LocalElasticsearch, versions
from versions.environments import CHOSEN, Environment, all_in, for_demo

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


@pytest.fixture(scope="session", params=[name for name in CHOSEN if name in ("oldest", "newest")])
def with_demo(request: pytest.FixtureRequest) -> Environment:
    """Return a fresh environment into which only the wheel was installed, with the extra [demo]."""
    made = for_demo(_chosen(request.param))
    made.make("demo")
    return made


def _chosen(name: str) -> Environment:
    wheel, folder = (Path(os.environ[each]).absolute() for each in ("EPOCHSINK_WHEEL", "EPOCHSINK_ENVIRONMENTS"))
    return all_in(wheel, folder)[name]
