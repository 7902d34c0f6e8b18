"""The whole demo: the services, the pipeline with epochsink, the plain pipeline, the closing table."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from epochsink.demo.act import Act, orders_per_epoch
from epochsink.demo.display import save_svg
from epochsink.demo.kills import EXACTLY_ONCE, PLAIN, plan
from epochsink.demo.settings import PipelineSettings
from epochsink.demo.table import PostgresTable
from epochsink.services import LocalKafka, LocalPostgres, spark_packages
from epochsink.services.commands import Kind, prefetch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.demo.destination import Destination
    from epochsink.demo.display import Display
    from epochsink.demo.kills import Kill
    from epochsink.services import KafkaService

EPOCHSINK: Final = "epochsink"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for. ``keep`` leaves services and files until Ctrl-C."""

    orders: int
    kills: int
    seed: int
    keep: bool
    svg: Path | None


def show(wishes: Wishes, display: Display) -> bool:
    """Run the demo; return whether every order went through epochsink exactly once. Nothing runs on afterwards."""
    display.say(
        f"{wishes.orders:,} orders and {wishes.kills} kills for each pipeline; the same again: --seed {wishes.seed}"
    )
    prefetch([Kind.KAFKA, Kind.POSTGRES])
    spark_packages()
    with ExitStack() as stack:
        kafka, postgres = LocalKafka(), LocalPostgres()
        stack.callback(kafka.close)
        stack.callback(postgres.close)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), (kafka, postgres)))
        display.say(f"Kafka {kafka.version} on {kafka.address}, PostgreSQL {postgres.version} on {postgres.address}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-demo-")))
        results = []
        for name, plain in ((EPOCHSINK, False), ("plain", True)):
            table = PostgresTable(postgres.dsn, postgres.jdbc_url, postgres.jdbc_driver, f"orders_{name}")
            act = _act(wishes, kafka, {"table": table}, folder=folder / name, plain=plain)
            results += act.run(display)
        display.close(results)
        if wishes.svg is not None:
            save_svg(results, wishes.svg)
        if wishes.keep:
            _keep(display, folder)
    return all(result.is_exact for result in results if result.pipeline == EPOCHSINK)


def _act(
    wishes: Wishes, kafka: KafkaService, destinations: Mapping[str, Destination], *, folder: Path, plain: bool
) -> Act:
    kills = _kills(destinations, wishes, plain=plain)
    folder.mkdir()
    settings = PipelineSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        topic=f"orders.{folder.name}",
        checkpoint=str(folder / "checkpoint"),
        orders_per_epoch=orders_per_epoch(wishes.orders, kills),
        plain=plain,
        destinations=destinations,
    )
    title = "foreachBatch" if plain else EPOCHSINK
    return Act(title, settings, orders=wishes.orders, kills=kills, folder=folder, seed=wishes.seed)


def _kills(destinations: Mapping[str, Destination], wishes: Wishes, *, plain: bool) -> list[Kill]:
    steps = dict(PLAIN if plain else EXACTLY_ONCE)
    if not plain:
        for destination in destinations.values():
            steps |= destination.points
    return plan(steps, wishes.kills, Random(wishes.seed))  # noqa: S311 - which step comes next is no secret


def _keep(display: Display, folder: Path) -> None:
    display.say(f"everything stays until Ctrl-C; for example: epochsink status {folder}/epochsink/checkpoint")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        display.say("ended")
