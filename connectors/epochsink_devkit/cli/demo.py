"""`epochsink demo`, as typed."""

from __future__ import annotations

import secrets
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from epochsink.cli.console import AsJson, answering
from epochsink.errors import ConfigurationError
from epochsink_devkit.demo.display import Result

_GIVEN: Final = "EPOCHSINK_DEMO_"
app = typer.Typer(add_completion=False)


@app.command()
def demo(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="PostgreSQL alone, one kill, 20,000 orders: about a minute.")
    ] = False,
    orders: Annotated[
        int | None, typer.Option(help="How many orders go through each pipeline; 200,000 unless --quick.", min=1_000)
    ] = None,
    kills: Annotated[int | None, typer.Option(help="How often each is killed -9; 7 unless --quick.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat the order of kills that a run has named.")] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Run the pipeline with epochsink on Spark Connect, too.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep services and files until Ctrl-C.")] = False,
    kafka: Annotated[str, typer.Option(help="Bootstrap servers of a Kafka that runs.", envvar=f"{_GIVEN}KAFKA")] = "",
    postgres: Annotated[
        str, typer.Option(help="DSN, a URL, of a PostgreSQL that runs.", envvar=f"{_GIVEN}POSTGRES")
    ] = "",
    elasticsearch: Annotated[
        str, typer.Option(help="URL of an Elasticsearch that runs.", envvar=f"{_GIVEN}ELASTICSEARCH")
    ] = "",
    master: Annotated[
        str, typer.Option(help="Spark's master; all workers must see the folder that TMPDIR names.")
    ] = "local[2]",
    page: Annotated[Path, typer.Option(help="Where to write the page that shows the course of the pipelines.")] = Path(
        "epochsink-demo.html"
    ),
    svg: Annotated[Path | None, typer.Option(help="Write the course as one picture, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Kill a real pipeline -9 again and again, with and without epochsink, and count the rows.

    Without: Spark's own writers, and an upsert by hand.

    Starts its own Kafka, PostgreSQL and Elasticsearch, unless it is told of three that run. Ends with status 0 only if
    every order went through epochsink exactly once.
    """
    with answering(as_json=as_json) as answer:
        where = (kafka, postgres, elasticsearch)
        if any(where) and not all(where):
            raise ConfigurationError(
                "--kafka, --postgres and --elasticsearch go together: the demo starts all three servers, or none",
                hint="give all three, or none of them",
            )
        given = where if all(where) else None
        seed = secrets.randbelow(10_000) if seed is None else seed
        orders, kills = orders or (20_000 if quick else 200_000), kills or (1 if quick else 7)
        options = {"orders": orders, "kills": kills, "keep": keep, "svg": svg, "page": page, "master": master}
        options |= {"quick": quick, "connect": connect}
        results = _show(given, Console(stderr=as_json), seed=seed, **options)
        exact = all(result.is_exact for result in results if result.pipeline in ("epochsink", "connect"))
        answer.values.update(seed=seed, exact=exact, page=str(page), results=[asdict(result) for result in results])
    raise typer.Exit(0 if exact else 1)


def _show(given: tuple[str, str, str] | None, console: Console, **options: Any) -> list[Result]:
    try:
        from epochsink_devkit.demo.display import Display  # noqa: PLC0415 - imports clients that only the demo needs
        from epochsink_devkit.demo.servers import ServerAddresses  # noqa: PLC0415 - likewise
        from epochsink_devkit.demo.show import DemoOptions, show  # noqa: PLC0415 - likewise
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"the demo needs the module {missing.name}", hint='pip install "epochsink[demo]"'
        ) from missing
    # so that everything is ended in order
    signal.signal(signal.SIGTERM, _interrupt)
    return show(DemoOptions(**options, addresses=ServerAddresses(*given) if given else None), Display(console))


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
