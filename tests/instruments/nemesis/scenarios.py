"""Named scenarios on the cluster of hosts, beside the faults at random: each brings about one order of events.

    python -m nemesis.scenarios [NAME ...] [--folder F]

A process is stopped at a named failpoint, the hosts are struck, and it goes on. Status 0 only if all are as they should
be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import psutil
from elasticsearch import Elasticsearch
from kafka.admin import KafkaAdminClient

from nemesis.faults import has_everything, start_again
from nemesis.hosts import SUBNET, missing
from nemesis.page import write_page
from nemesis.rig import Rig
from nemesis.services import until
from nemesis.set_back import WENT_BACK, set_back
from nemesis.store import STORES

if TYPE_CHECKING:
    from collections.abc import Callable

    from nemesis.hosts import Host
    from nemesis.services import Broker

ARMED_SECONDS: Final = 300.0
TASK_SECONDS: Final = 90.0
CUT_SECONDS: Final = 25.0


class Scene:
    """One scenario under way."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.cluster = rig.cluster

    def stop_at(self, point: str, count: int = 2) -> psutil.Process:
        """Start the next driver so that a process stops at a failpoint; return that process when it has."""
        supervisor = self.rig.supervisor
        supervisor.arm = {"EPOCHSINK_FAILPOINT": f"{point}:{count}", "EPOCHSINK_FAILPOINT_SIGNAL": "STOP"}
        supervisor.kill()
        self.rig.wait(lambda: self._stopped() is not None, ARMED_SECONDS, f"a process at {point}")
        stopped = self._stopped()
        assert stopped is not None
        self.rig.timeline.tell("stopped", point=point, where=self.host_of(stopped).name)
        return stopped

    def _stopped(self) -> psutil.Process | None:
        for host in self.cluster.spark.values():
            for pid in host.pids():
                try:
                    process = psutil.Process(pid)
                    if process.status() == psutil.STATUS_STOPPED:
                        return process
                except psutil.NoSuchProcess:
                    continue
        return None

    def host_of(self, process: psutil.Process) -> Host:
        """Return the host on which a process runs."""
        return next(host for host in self.cluster.spark.values() if process.pid in host.pids())

    def go_on(self, process: psutil.Process) -> None:
        """Let a stopped process go on, if it still lives."""
        self.rig.timeline.tell("goes on", lives=process.is_running())
        if process.is_running():
            os.kill(process.pid, signal.SIGCONT)

    def fault(self, kind: str, where: str, make: Callable[[], object]) -> None:
        """Make a fault, and say so."""
        self.rig.timeline.tell("fault", kind=kind, where=where)
        make()

    def healed(self, kind: str, where: str, undo: Callable[[], object]) -> None:
        """Heal it, and say so."""
        undo()
        self.rig.timeline.tell("healed", kind=kind, where=where)


def zombie_executor(point: str) -> Callable[[Scene], None]:
    """Return a scenario: a task is cut off, its copy runs elsewhere and is committed, and then the first goes on."""

    def play(scene: Scene) -> None:
        stopped = scene.stop_at(point)
        host = scene.host_of(stopped)
        network = f"{host.network.subnet}.0/24"
        # Spark gives the executor up, and the task runs again on the other host
        scene.fault("isolated", host.name, lambda: host.cut(network))
        epochs = scene.rig.watch.epochs
        scene.rig.wait(lambda: scene.rig.watch.epochs > epochs + 1, TASK_SECONDS, "the epoch without the host")
        # first the zombie, so that it works before its executor is told to end
        scene.go_on(stopped)
        scene.healed("isolated", host.name, host.connect)
        scene.rig.progress()

    return play


def coordinator_moves(scene: Scene) -> None:
    """Take the leader away from Kafka's transaction coordinator between the vote and the commit."""
    stopped = scene.stop_at("coordinator.commit.before", 3)
    broker = coordinator(scene)
    scene.fault("killed", broker.host.name, broker.host.kill)
    scene.go_on(stopped)
    scene.rig.progress()
    scene.healed("killed", broker.host.name, lambda: start_again(broker))


def driver_without_the_coordinator(scene: Scene) -> None:
    """Cut the driver off from Kafka's transaction coordinator, and from no other broker, between vote and commit."""
    stopped = scene.stop_at("coordinator.commit.before", 3)
    broker, driver = coordinator(scene).host, scene.host_of(stopped)
    link = f"{driver.name} -x- {broker.name}"
    scene.fault("link cut", link, lambda: driver.cut(broker.address))
    scene.go_on(stopped)
    with suppress(TimeoutError):
        scene.rig.progress(CUT_SECONDS)
    scene.healed("link cut", link, driver.connect)
    scene.rig.progress()


def coordinator(scene: Scene) -> Broker:
    """Return the broker that coordinates a transaction which is open now."""
    admin = KafkaAdminClient(bootstrap_servers=scene.cluster.bootstrap_servers.split(","))
    try:
        listed = admin.list_transactions(state_filters=["Ongoing"])
    finally:
        admin.close()
    holder = next(number for number, listings in listed.items() if listings)
    return scene.cluster.brokers[int(holder) - 1]


def promotion_between_prepare_and_commit(scene: Scene) -> None:
    """Promote the synchronous standby when an epoch is prepared on the old primary, decided, and not committed."""
    stopped = scene.stop_at("coordinator.commit.before", 3)
    primary, standby, _ = scene.cluster.roles()
    until(lambda: has_everything(primary), 30, "the synchronous standby")
    assert primary.query("SELECT count(*) FROM pg_prepared_xacts"), "nothing is prepared: the scenario shows nothing"
    scene.fault("killed", primary.host.name, primary.host.kill)
    standby.promote()
    assert standby.query("SELECT count(*) FROM pg_prepared_xacts"), "the standby lacks what was prepared"
    scene.go_on(stopped)
    # commits there wait for a standby of its own
    scene.healed("killed", primary.host.name, lambda: primary.follow(standby))
    scene.rig.progress()


def promotion_of_a_standby_that_lags(scene: Scene) -> None:
    """Promote the standby that nobody waits for, which lacks epochs that are done: the query has to stop."""
    set_back(scene.rig)
    supervisor = scene.rig.supervisor
    epochs = scene.rig.watch.epochs
    # started again it says the same, and decides nothing
    scene.rig.wait(lambda: supervisor.deaths_of(WENT_BACK) > 1, ARMED_SECONDS, "the same error again")
    assert scene.rig.watch.epochs <= epochs + 1, "epochs went on although rows are lost"
    raise Stopped(supervisor.last_words)


def elasticsearch_primary_lost(scene: Scene) -> None:
    """Lose the node with the primary shard when some bulk requests of an epoch are applied."""
    stopped = scene.stop_at("elasticsearch.bulk.between", 3)
    client = Elasticsearch(scene.cluster.urls, request_timeout=20)
    shards = cast("list[dict[str, str]]", client.cat.shards(index="log", format="json").body)
    client.close()
    holder = next(shard["node"] for shard in shards if shard["prirep"] == "p")
    node = next(one for one in scene.cluster.nodes if one.host.name == holder)
    scene.rig.blindfold.cover({"elastic"})
    scene.fault("killed", node.host.name, node.host.kill)
    scene.go_on(stopped)
    scene.rig.wait(lambda: not stopped.is_running() or stopped.status() != psutil.STATUS_STOPPED, 10, "going on")
    scene.healed("killed", node.host.name, lambda: start_again(node))
    scene.rig.blindfold.uncover({"elastic"})
    scene.rig.progress()


def cut_off_from_the_store(scene: Scene) -> None:
    """Cut the driver off from the checkpoint's store when all have voted, when all is decided; then an executor.

    The driver cannot know what it has recorded. The executor has written its rows, and not its file of the spool.
    """
    assert scene.cluster.store is not None
    store = scene.cluster.store.host
    for point in ("coordinator.record.before", "coordinator.commit.before", "task.written"):
        stopped = scene.stop_at(point, 3)
        host = scene.host_of(stopped)
        link = f"{host.name} -x- {store.name}"
        scene.fault("link cut", link, partial(host.cut, store.address))
        # what is decided already is no progress
        scene.rig.watch.look()
        scene.go_on(stopped)
        # longer than the client waits for one answer, and than a look at the checkpoint
        with suppress(TimeoutError):
            scene.rig.progress(CUT_SECONDS)
        scene.healed("link cut", link, host.connect)
        scene.rig.progress()


class Stopped(Exception):
    """The query has stopped for good, as it had to: there is nothing more to judge."""


SCENARIOS: Final[dict[str, tuple[str, Callable[[Scene], None]]]] = {
    "zombie-kafka": ("kafka", zombie_executor("kafka.produced")),
    "zombie-postgres": ("postgres", zombie_executor("task.written")),
    "zombie-elasticsearch": ("elasticsearch", zombie_executor("task.written")),
    "cut-off-from-hdfs": ("postgres", cut_off_from_the_store),
    "cut-off-from-s3": ("postgres", cut_off_from_the_store),
    "coordinator-moves": ("kafka", coordinator_moves),
    "driver-without-the-coordinator": ("kafka", driver_without_the_coordinator),
    "promotion-before-commit": ("postgres", promotion_between_prepare_and_commit),
    "promotion-of-a-lagging-standby": ("postgres", promotion_of_a_standby_that_lags),
    "primary-shard-lost": ("elasticsearch", elasticsearch_primary_lost),
}


def play(name: str, folder: Path, subnet: str) -> list[str]:
    """Play one scenario; return what is wrong."""
    sinks, scenario = SCENARIOS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    summary: dict[str, object] = {"sinks": sinks, "seed": name}
    try:
        store = next((store for store in STORES if store in name), "")
        with Rig(folder, [sinks], 1, canaries=False, store=store, subnet=subnet) as rig:
            rig.begin()
            scenario(Scene(rig))
            report = rig.finish()
            summary |= {"counts": report.counts}
            wrong = [*map(str, report.anomalies), *rig.watch.recorded.refusals()]
    except Stopped as stopped:
        summary |= {"stopped": str(stopped)}
        wrong = []
    except (AssertionError, TimeoutError, RuntimeError, StopIteration) as failure:
        traceback.print_exc()
        wrong = [f"{type(failure).__name__}: {failure}"]
    print(f"{name}: {json.dumps(summary)} {wrong or 'as it should be'}", flush=True)
    write_page(folder, summary | {"anomalies": wrong})
    return wrong


def main() -> int:
    """Play the scenarios that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--folder", type=Path, default=Path("artifacts/nemesis"))
    parser.add_argument("--subnet", default=SUBNET, help="three numbers; another one for each run at the same time")
    chosen = parser.parse_args()
    if absent := missing():
        print(absent)
        return 1
    # so that nothing is left: an exit runs what a signal would not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wrong = [play(name, (chosen.folder / name).absolute(), chosen.subnet) for name in chosen.names or SCENARIOS]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
