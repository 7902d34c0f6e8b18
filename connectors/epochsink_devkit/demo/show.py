"""Run the whole demo: the servers, the pipeline with epochsink, two without it, the closing table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from epochsink.errors import ServiceError
from epochsink_devkit.demo.destination import Destination
from epochsink_devkit.demo.display import CONNECT, EPOCHSINK, OURS, Display, Result, page_of, picture_of
from epochsink_devkit.demo.kill_plan import EXACTLY_ONCE, PLAIN, plan
from epochsink_devkit.demo.scenario import Scenario, orders_per_epoch
from epochsink_devkit.demo.servers import OwnServers, RunningServers, ServerAddresses, Servers
from epochsink_devkit.demo.session import JVM_OPTIONS, LOCAL, is_made, jvm_options
from epochsink_devkit.demo.settings import PipelineSettings
from epochsink_devkit.services import spark_packages


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The user's options. ``keep`` keeps services and files until Ctrl-C; ``master`` is Spark's.

    ``quick``: PostgreSQL is the only target. Without ``addresses`` the demo starts its own servers.
    ``connect``: the pipeline with epochsink runs on Spark Connect, too.
    """

    orders: int
    kills: int
    seed: int
    keep: bool
    svg: Path | None
    page: Path
    quick: bool = False
    connect: bool = False
    master: str = LOCAL
    addresses: ServerAddresses | None = None


def show(options: DemoOptions, display: Display) -> list[Result]:
    """Run the demo; return the lines of its closing table. Leaves nothing running."""
    display.say(
        f"{options.orders:,} orders and {options.kills} kills for each pipeline; the same again: --seed {options.seed}"
    )
    spark_packages()
    with ExitStack() as stack:
        quick, where = options.quick, options.addresses
        servers = OwnServers(quick=quick) if where is None else RunningServers(where, quick=quick)
        stack.callback(servers.close)
        with ThreadPoolExecutor(1) as pool:
            jvm_options = pool.submit(_jvm_options, display, options)
            display.say(servers.start())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-demo-")))
        results: list[Result] = []
        courses = {}
        for title, destinations in (
            (EPOCHSINK, servers.destinations()),
            *([(CONNECT, servers.destinations("orders_connect"))] if options.connect else []),
            ("plain", servers.plain_destinations()),
            ("upsert", servers.upserted_destinations()),
        ):
            scenario = _scenario(
                title, options, servers, folder / title, destinations, jvm_options=jvm_options.result()
            )
            results += scenario.run(display)
            courses[title] = scenario.course()
        display.close(results)
        if options.svg is not None:
            options.svg.write_text(picture_of(results, courses))
        options.page.write_text(page_of(results, courses))
        display.say(f"to open in a browser: {options.page}")
        if options.keep:
            _keep(display, folder)
    return results


def _jvm_options(display: Display, options: DemoOptions) -> str:
    if options.addresses is not None:
        # Creating the archive needs a broker that the demo started.
        return JVM_OPTIONS
    try:
        if not is_made():
            if options.quick:
                return JVM_OPTIONS
            display.say("archiving Spark's classes, once for all runs: every start of Spark is then twice as fast")
        return jvm_options()
    except ServiceError as failure:
        display.say(f"Spark starts without the archive, more slowly: {failure}")
        return JVM_OPTIONS


def _scenario(
    title: str,
    options: DemoOptions,
    servers: Servers,
    folder: Path,
    destinations: Mapping[str, Destination],
    *,
    jvm_options: str,
) -> Scenario:
    plain = title not in OURS
    steps = [step for step in (PLAIN if plain else EXACTLY_ONCE) if step.destinations <= len(destinations)]
    if not plain:
        steps += [step for destination in destinations.values() for step in destination.steps]
    kills = plan(steps, options.kills, Random(options.seed))  # noqa: S311 - which step comes next is no secret
    folder.mkdir()
    settings = PipelineSettings(
        bootstrap_servers=servers.addresses.kafka,
        topic=f"orders.{title}{servers.mark}",
        checkpoint=str(folder / "checkpoint"),
        orders_per_epoch=orders_per_epoch(options.orders, kills),
        plain=plain,
        jvm_options=jvm_options,
        master=options.master,
        epochs=str(folder / "epochs.jsonl"),
        destinations=destinations,
        connect=title == CONNECT,
    )
    return Scenario(title, settings, orders=options.orders, kills=kills, folder=folder, seed=options.seed)


def _keep(display: Display, folder: Path) -> None:
    display.say(f"everything is kept until Ctrl-C; for example: epochsink status {folder}/epochsink/checkpoint")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        display.say("ended")
