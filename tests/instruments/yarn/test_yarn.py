"""A pipeline into all three sinks on YARN: containers, NodeManagers and application masters are killed and frozen."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import pyspark
import pytest
from harness import PIPELINE

from epochsink_devkit.services import LocalElasticsearch, LocalHdfs, LocalKafka, LocalPostgres
from yarn.cluster import ATTEMPTS, LOST_SECONDS, YarnCluster
from yarn.rig import World, YarnHarness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fix_services import FreshName

EPOCH_ROWS: Final = 30
"""Rows of an epoch in each of the two partitions of the source."""
KILLS: Final = int(os.environ.get("EPOCHSINK_KILLS", "6"))
MASTER_KILLS: Final = min(KILLS, ATTEMPTS - 1, 4)
EPOCHS_AHEAD: Final = 5
"""Epochs of input for each kill: more than are decided until the next one. One takes as little as 0.6 s."""
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
        # PySpark from there, too: what Spark sends to a container is a zip file, without the jars that tests fetch by
        places = (PIPELINE.parent, Path(pyspark.__file__).parents[1])
        patched.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
        yield World(kafka, postgres, elasticsearch, hdfs, yarn)


@pytest.fixture
def client(tmp_path: Path, world: World, fresh_table: FreshName) -> Iterator[YarnHarness]:
    """Return a pipeline in client mode."""
    with YarnHarness(tmp_path, world, fresh_table("client"), cluster_mode=False) as harness:
        yield harness


@pytest.fixture
def cluster(tmp_path: Path, world: World, fresh_table: FreshName) -> Iterator[YarnHarness]:
    """Return a pipeline in cluster mode."""
    with YarnHarness(tmp_path, world, fresh_table("cluster"), cluster_mode=True) as harness:
        yield harness


def test_executors_whose_containers_are_killed_lose_and_double_nothing(client: YarnHarness) -> None:
    """By turns the JVM alone is killed, as for want of memory, and all that is in a container."""
    chance = random.Random(SEED)
    client.feed(KILLS * EPOCHS_AHEAD * EPOCH_ROWS)
    with client.start() as process:
        for number in range(KILLS):
            client.wait_for_epochs(process, 1)
            client.pause(process, chance.uniform(0, 2))
            victim = chance.choice(client.wait_for(process, client.executors, "an executor"))
            client.kill_one(process, f"executor {victim.name}", victim if number % 2 else victim.jvm)
        client.wait_for_epochs(process, 1)
        client.ends_well(process)
    client.verdict(seed=SEED, executors_killed=KILLS)


def test_executors_that_are_preempted_while_a_task_prepares_lose_and_double_nothing(
    client: YarnHarness, tmp_path: Path
) -> None:
    """Another queue claims the memory that it is guaranteed when a task has prepared and not returned."""
    once = tmp_path / "once"
    client.feed(6 * EPOCH_ROWS)
    with client.start(settings=client.armed("task.prepared", once)) as process:
        container, worker = client.stopped(process, once)
        jvm = container.jvm
        assert jvm is not None
        client.yarn.crowd(2, 2048, 600)
        client.wait_for(process, lambda: not jvm.is_running(), "the preemption")
        client.log.write("killed", what=f"{container.name} is preempted", pid=jvm.pid)
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGCONT)
        client.wait_for_epochs(process, 2)
        client.ends_well(process)
    outputs = (client.yarn.node_of(name).output(name) for name in client.masters())
    preempted = sum(output.count("was preempted") for output in outputs)
    assert preempted > 0
    client.verdict(executors_preempted=preempted)


def test_a_task_on_a_node_that_hangs_goes_on_after_its_copy_is_committed(client: YarnHarness, tmp_path: Path) -> None:
    """The node is lost when the task has written its rows; as it comes back, the task prepares them."""
    once = tmp_path / "once"
    client.feed(8 * EPOCH_ROWS)
    with client.start(settings=client.armed("task.written", once)) as process:
        container, worker = client.stopped(process, once)
        node = client.yarn.node_of(container.name)
        node.send(signal.SIGSTOP)
        container.send(signal.SIGSTOP)
        client.log.write("killed", what=f"the node of {container.name} hangs", pid=worker.pid)
        client.wait_for_epochs(process, 2)
        container.send(signal.SIGCONT)
        client.wait_for_epochs(process, 1)
        node.send(signal.SIGCONT)
        client.ends_well(process)
    client.verdict(nodes_frozen=1)


def test_a_master_that_wakes_up_beside_its_second_attempt_is_fenced(cluster: YarnHarness, tmp_path: Path) -> None:
    """Its host hangs when all sinks have voted. It wakes up while the ResourceManager, too, cannot tell it to end."""
    once = tmp_path / "once"
    cluster.feed(10 * EPOCH_ROWS)
    with cluster.start(crash="coordinator.record.before:3", once=str(once), stop=True) as process:
        container, driver = cluster.stopped(process, once)
        assert container.is_master
        jvm, node, attempt = container.jvm, cluster.yarn.node_of(container.name), cluster.open_attempt()
        assert jvm is not None
        node.send(signal.SIGSTOP)
        jvm.send_signal(signal.SIGSTOP)
        cluster.log.write("killed", what=f"{container.name} and its host are frozen", pid=driver.pid)
        cluster.log.write("aborted", attempt=attempt)
        cluster.wait_for(process, lambda: cluster.takes() >= 2, "attempt 2")
        cluster.wait_for_epochs(process, 1)
        cluster.yarn.manager.send(signal.SIGSTOP)
        jvm.send_signal(signal.SIGCONT)
        driver.send_signal(signal.SIGCONT)
        cluster.wait_for(process, lambda: "Fenced" in node.output(container.name), "the fencing of attempt 1")
        cluster.yarn.manager.send(signal.SIGCONT)
        node.send(signal.SIGCONT)
        cluster.ends_well(process)
    assert cluster.takes() == 2
    cluster.verdict(application_masters_frozen=1)


def test_attempts_go_on_where_application_masters_are_killed(cluster: YarnHarness) -> None:
    """By turns the JVM alone is killed, with the driver's Python still there, and all that is in the container."""
    chance = random.Random(SEED)
    cluster.feed(EPOCHS_AHEAD * EPOCH_ROWS)
    with cluster.start() as process:
        for number in range(MASTER_KILLS):
            master = cluster.master(process, number + 1)
            cluster.wait_for_epochs(process, 1)
            # an attempt processes what is there at its start
            cluster.feed(EPOCHS_AHEAD * EPOCH_ROWS)
            cluster.pause(process, chance.uniform(0, 2))
            cluster.kill_one(process, f"application master {master.name}", master if number % 2 else master.jvm)
        cluster.master(process, MASTER_KILLS + 1)
        cluster.wait_for_epochs(process, 1)
        cluster.ends_well(process)
    cluster.verdict(seed=SEED, application_masters_killed=MASTER_KILLS)


def test_an_attempt_goes_on_on_the_other_node_where_the_node_manager_of_a_master_is_killed(
    cluster: YarnHarness,
) -> None:
    """The first master lives, with its executors, until the ResourceManager tells it that its attempt has ended."""
    # it goes on until its node is lost
    cluster.feed(3 * LOST_SECONDS * EPOCH_ROWS)
    with cluster.start() as process:
        first = cluster.master(process, 1)
        node = cluster.yarn.node_of(first.name)
        cluster.wait_for_epochs(process, 1)
        cluster.feed(EPOCHS_AHEAD * EPOCH_ROWS)
        with cluster.without(process, node, first.name):
            second = cluster.master(process, 2)
            assert cluster.yarn.node_of(second.name) is not node
            cluster.wait_for_epochs(process, 1)
            cluster.ends_well(process)
    cluster.verdict(node_managers_killed=1)


def test_tasks_run_again_on_the_other_node_where_the_node_manager_of_executors_is_killed(cluster: YarnHarness) -> None:
    """The executors live, and their tasks hang, until the master, on the other node, tells them to stop."""
    cluster.feed(2 * EPOCHS_AHEAD * EPOCH_ROWS)
    with cluster.start() as process:
        master = cluster.master(process, 1)
        node = next(one for one in cluster.yarn.nodes if one is not cluster.yarn.node_of(master.name))
        cluster.wait_for_epochs(process, 1)
        executors = cluster.wait_for(process, node.containers, "an executor on the other node")
        workers = [one for container in executors for one in container.processes if one.name().startswith("python")]
        assert workers
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        with cluster.without(process, node, " ".join(one.name for one in executors)):
            cluster.wait_for_epochs(process, 2)
            for worker in workers:
                # the first to go on ends the others, if their executor has ended
                with suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGCONT)
            cluster.wait_for_epochs(process, 1)
            cluster.ends_well(process)
    assert cluster.takes() == 1
    cluster.verdict(node_managers_killed=1, executors_on_it=len(executors))
