"""A pipeline into all three sinks on YARN: containers of executors are killed."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Final

import pytest

from epochsink_devkit.services import LocalElasticsearch, LocalHdfs, LocalKafka, LocalPostgres
from epochsink_devkit.services.yarn import YarnCluster
from yarn.rig import World, YarnHarness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName

EPOCH_ROWS: Final = 30
"""Rows of an epoch in each of the two partitions of the source."""
KILLS: Final = int(os.environ.get("EPOCHSINK_KILLS", "6"))
SEED: Final = int(os.environ.get("EPOCHSINK_SEED", "0")) or random.SystemRandom().randrange(10**6)

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return all servers."""
    with (
        LocalKafka(short_lived=True) as kafka,
        LocalPostgres() as postgres,
        LocalElasticsearch(short_lived=True) as elasticsearch,
        LocalHdfs() as hdfs,
        YarnCluster(tmp_path_factory.mktemp("yarn"), hdfs) as yarn,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("HADOOP_CONF_DIR", str(yarn.configuration))
        yield World(kafka, postgres, elasticsearch, hdfs, yarn)


@pytest.fixture
def client(tmp_path: Path, world: World, fresh_table: FreshName) -> Iterator[YarnHarness]:
    """Return a pipeline in client mode."""
    with YarnHarness(tmp_path, world, fresh_table("client")) as harness:
        yield harness


def test_executors_whose_containers_are_killed_lose_and_double_nothing(client: YarnHarness) -> None:
    """By turns the JVM alone is killed, as for want of memory, and all that is in a container."""
    chance = random.Random(SEED)
    client.feed((KILLS + 4) * EPOCH_ROWS)
    with client.start() as process:
        for number in range(KILLS):
            client.wait_for_epochs(process, 1)
            executors = client.wait_for(process, client.executors, "an executor")
            client.pause(process, chance.uniform(0, 2))
            victim = chance.choice(executors)
            client.kill_one(process, f"executor {victim.name}", victim if number % 2 else victim.jvm)
        client.wait_for_epochs(process, 1)
        client.ends_well(process)
    client.verdict(seed=SEED, executors_killed=KILLS)
