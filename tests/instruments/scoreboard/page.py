"""Write the scoreboard: a table for the terminal, and docs/explanation/scoreboard.md."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark
from flink_jars import FLINK, JDBC_CONNECTOR, KAFKA_CONNECTOR
from rich.table import Table

import epochsink
from epochsink_devkit.services.artifacts import spark_packages
from epochsink_devkit.services.versions import KAFKA, POSTGRES, POSTGRES_JDBC, elasticsearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scoreboard.game import Plan
    from scoreboard.judge import Verdict
    from scoreboard.systems import System

PAGE: Final = Path(__file__).parents[3] / "docs" / "explanation" / "scoreboard.md"
TEMPLATE: Final = Path(__file__).with_name("template.md")
COLUMNS: Final = ("lost", "doubled", "early", "stuck")


@dataclass(frozen=True)
class Result:
    """A system, and what became of its rows; or why there is no verdict."""

    system: System
    verdict: Verdict | None
    failure: str = ""

    @property
    def figures(self) -> list[str]:
        """The four figures."""
        if self.verdict is None:
            return ["no verdict"] * len(COLUMNS)
        return [f"{getattr(self.verdict, name):,}" for name in COLUMNS]


def table(results: Sequence[Result], plan: Plan) -> Table:
    """Return the result for a terminal."""
    made = Table("system", *COLUMNS, "kills", "reads", caption=f"{plan.rows:,} rows each, SEED={plan.seed}")
    for result in results:
        found = result.verdict
        beside = [str(found.kills), str(found.reads)] if found else [result.failure, ""]
        made.add_row(result.system.title, *result.figures, *beside, style="bold" if result.system.ours else "")
    return made


def versions(packages: Sequence[str]) -> str:
    """Return the versions of what does the writing."""
    jars = {jar.name.removesuffix(".jar").rpartition("-")[0]: jar for jar in spark_packages()}
    known = {
        "kafka-clients": jars["kafka-clients"].stem.rpartition("-")[2],
        "postgresql-jdbc": POSTGRES_JDBC,
        "epochsink": epochsink.__version__,
        "flink": FLINK,
        **{connector.module: connector.version for connector in (KAFKA_CONNECTOR, JDBC_CONNECTOR)},
    }
    return ", ".join(f"{name} {known.get(name) or metadata.version(name)}" for name in packages)


def write_page(results: Sequence[Result], plan: Plan, day: str) -> None:
    """Write the page."""
    PAGE.write_text(page(results, plan, day))


def page(results: Sequence[Result], plan: Plan, day: str) -> str:
    """Return the page's text."""
    unwatched = sum(result.verdict.unwatched for result in results if result.verdict)
    return TEMPLATE.read_text().format(
        day=day,
        rows=plan.rows,
        kills=len(plan.pauses),
        seed=plan.seed,
        results="\n".join(map(_row, results)),
        settings="\n".join(map(_setting, results)),
        watched=_watched(unwatched),
        failures="".join(f"\n\n{one.system.title}: {one.failure}." for one in results if one.failure),
        spark=pyspark.__version__,
        kafka=KAFKA,
        postgres=POSTGRES,
        elasticsearch=elasticsearch().version,
    )


def _row(result: Result) -> str:
    found = result.verdict
    beside = [str(found.kills), f"{found.reads:,}"] if found else ["", ""]
    title = f"**{result.system.title}**" if result.system.ours else result.system.title
    return f"| {' | '.join([title, result.system.promise, *result.figures, *beside])} |"


def _setting(result: Result) -> str:
    system = result.system
    return f"| {system.title} | {system.setting} | {versions(system.packages)} |"


def _watched(unwatched: int) -> str:
    if not unwatched:
        return "After each kill a reader looked before the next epoch was decided."
    return f"After {unwatched} of all kills no reader looked before the next epoch was decided."
