"""`make bench ONLY=outage`: what Prometheus, `epochsink status` and `epochsink report` say while a target is away.

A pipeline writes into a table. Its metrics are scraped every second, `status --json` is asked every few seconds, and
at the end `report` draws its page. The server is stopped in the middle (a scheduler starts the query again whenever it
ends), or frozen with ``--how frozen``. Ends with status 1 if the age did not rise and fall in all three, or if a row is
missing or there twice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from beside import Beside
from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families
from results import machine
from rich.console import Console

from epochsink import ExactlyOnce, Postgres
from epochsink.metrics import export
from epochsink_devkit.demo.session import jvm_options, session
from epochsink_devkit.services import LocalPostgres
from epochsink_devkit.services.ports import free_port
from epochsink_devkit.svg import WIDTH, Svg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRIGGER_SECONDS: Final = 10
"""Ten minutes are 60 epochs then: the ledger keeps the receipts of all of them for the report."""
ROWS: Final = 1_000
SCRAPE_SECONDS: Final = 1.0
STATUS_SECONDS: Final = 4.0
START_SECONDS: Final = 120.0
STATUS_TIMEOUT: Final = 60.0
SETTLED_SECONDS: Final = 15.0
"""An age below this is that of a pipeline whose targets answer, on a busy machine."""
LATE: Final = "epochsink_decided_not_visible_seconds"
OPEN: Final = "epochsink_oldest_open_epoch_seconds"

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Seen:
    """What was seen at a time (seconds after the start): how late, for how long under way."""

    at: float
    late: float
    open: float

    @property
    def age(self) -> float:
        """The larger of both."""
        return max(self.late, self.open)


@dataclass(frozen=True)
class Course:
    """What a run has shown. ``away`` are the seconds at which the server went and came back."""

    how: str
    away: tuple[float, float]
    prometheus: Sequence[Seen]
    status: Sequence[Seen]
    epochs: Sequence[tuple[float, float]]
    headlines: Sequence[tuple[float, str]]
    starts: Sequence[float]
    unanswered: int
    rows: int
    missing: int
    twice: int

    @property
    def shown(self) -> dict[str, list[Seen]]:
        """What each of the three has shown, in the order in which a person looks."""
        took = [Seen(at, 0.0, seconds) for at, seconds in self.epochs]
        return {"Prometheus": list(self.prometheus), "status": list(self.status), "report": took}

    def faults(self) -> list[str]:
        """Return in words what is not as it has to be."""
        gone, back = self.away
        found = []
        for name, seen in self.shown.items():
            before = max((one.age for one in seen if one.at < gone), default=math.inf)
            peak = max((one.age for one in seen if one.at >= gone), default=0.0)
            # what was stopped at once has begun an epoch before at the latest when the next one was due
            if peak < back - gone - TRIGGER_SECONDS - 5:
                found.append(f"{name}: the age rose to {peak:.1f} s only")
            if before > SETTLED_SECONDS or not seen or seen[-1].age > SETTLED_SECONDS:
                found.append(f"{name}: the age was {before:.1f} s before, and {seen[-1].age:.1f} s at the end")
        if self.missing or self.twice:
            found.append(f"{self.missing} rows are missing, {self.twice} are there twice")
        return found


def pipeline(dsn: str, checkpoint: str, port: int) -> None:
    """Write a stream into a table until SIGTERM, and serve the metrics."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = session(jvm_options())
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    table = Postgres(dsn, table="outage")
    sink = ExactlyOnce(checkpoint=checkpoint, sinks={"table": table})
    export(sink, query="outage")
    start_http_server(port, "127.0.0.1")
    writer = source.selectExpr("value AS id", "repeat('x', 100) AS payload").writeStream
    query = sink.start(writer.trigger(processingTime=f"{TRIGGER_SECONDS} seconds"))
    signal.signal(signal.SIGTERM, lambda *_: query.stop())
    query.awaitTermination()


class Scrapes(Beside):
    """Reads the metrics as Prometheus does."""

    def __init__(self, port: int, clock: Callable[[], float]) -> None:
        super().__init__(SCRAPE_SECONDS)
        self._address = f"http://127.0.0.1:{port}/metrics"
        self._clock = clock
        self.seen: list[Seen] = []
        self.unanswered = 0

    def look(self) -> None:
        """Scrape once."""
        try:
            with urllib.request.urlopen(self._address, timeout=5) as answer:  # noqa: S310 - our own
                text = answer.read().decode()
        except OSError:
            self.unanswered += 1
            return
        families = text_string_to_metric_families(text)
        told = {sample.name: sample.value for family in families for sample in family.samples}
        self.seen.append(Seen(round(self._clock(), 1), told[LATE], told[OPEN]))


class Statuses(Beside):
    """Asks `epochsink status --json`."""

    def __init__(self, checkpoint: str, clock: Callable[[], float]) -> None:
        super().__init__(STATUS_SECONDS)
        self._checkpoint = checkpoint
        self._clock = clock
        self.seen: list[Seen] = []
        self.headlines: list[tuple[float, str]] = []

    def look(self) -> None:
        """Ask once."""
        asked = self._clock()
        answer = _epochsink("status", self._checkpoint, "--json")
        self.seen.append(Seen(round(asked, 1), answer["late_seconds"], answer["open_seconds"]))
        if not self.headlines or _numberless(self.headlines[-1][1]) != _numberless(answer["headline"]):
            self.headlines.append((round(asked, 1), answer["headline"]))


def _numberless(headline: str) -> str:
    return re.sub(r"\d+( min| s)?", "N", headline)


def _epochsink(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "epochsink.cli.app", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=STATUS_TIMEOUT,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Scheduler(Beside):
    """Starts the pipeline, and starts it again when it has ended."""

    def __init__(self, command: Sequence[str], log: Path, clock: Callable[[], float]) -> None:
        super().__init__(0.5)
        self._command = command
        self._log = log
        self._clock = clock
        self.starts: list[float] = []
        self._start()

    def _start(self) -> None:
        self.starts.append(round(self._clock(), 1))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def look(self) -> None:
        """Look whether it has ended."""
        if self._process.poll() is not None:
            self._start()

    def close(self) -> None:
        """Stop it in order."""
        self._process.terminate()
        self._process.wait(START_SECONDS)


def run(seconds: float, away: float, how: str) -> Course:
    """Run the pipeline for so many seconds, and take its server away in the middle of them."""
    with tempfile.TemporaryDirectory(prefix="epochsink-outage-") as folder, LocalPostgres() as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE outage (id bigint, payload text)")
        checkpoint, port, log = f"{folder}/checkpoint", free_port(), Path(folder, "log")
        began = time.monotonic()

        def clock() -> float:
            return time.monotonic() - began

        command = [sys.executable, __file__, "--pipeline", server.dsn, checkpoint, str(port)]
        with Scheduler(command, log, clock) as scheduler:
            _wait_for_epochs(Path(checkpoint, "commits"), scheduler, log)
            # time begins when the pipeline is warm
            began, wall = time.monotonic(), time.time()
            scrapes, statuses = Scrapes(port, clock), Statuses(checkpoint, clock)
            with scrapes, statuses:
                middle = (seconds - away) / 2
                time.sleep(middle)
                gone = clock()
                console.print(f"{gone:.0f} s: the server is {how}")
                server.stop() if how == "stopped" else server.pause()
                time.sleep(away)
                server.start() if how == "stopped" else server.resume()
                back = clock()
                console.print(f"{back:.0f} s: the server is back")
                time.sleep(max(0.0, seconds - back))
        page = Path(folder, "report.html")
        _epochsink("report", checkpoint, "-o", str(page), "--json")
        with psycopg.connect(server.dsn) as connection:
            rows, single = connection.execute("SELECT count(*), count(DISTINCT id) FROM outage").fetchone() or (0, 0)
            newest = (connection.execute("SELECT max(id) FROM outage").fetchone() or (0,))[0]
        return Course(
            how,
            (round(gone, 1), round(back, 1)),
            scrapes.seen,
            statuses.seen,
            [(round(at - wall, 1), took) for at, took in epochs_of(page.read_text())],
            statuses.headlines,
            scheduler.starts[1:],
            scrapes.unanswered,
            rows,
            newest + 1 - single,
            rows - single,
        )


def _wait_for_epochs(commits: Path, process: Scheduler, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (commits.exists() and len([*commits.glob("[0-9]*")]) > 1):
        if time.monotonic() > deadline or len(process.starts) > 1:
            raise RuntimeError(f"the pipeline does not run:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


def epochs_of(page: str) -> list[tuple[float, float]]:
    """Return from the report's table when each epoch became visible (since 1970), and after how many seconds."""
    found = []
    for row in re.findall(r"<tr><td[^>]*>\d+</td>(.*?)</tr>", page):
        visible, *rest = re.findall(r"<td[^>]*>(.*?)</td>", row)
        at = datetime.strptime(visible, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
        found.append((at, round(sum(float(cell[:-2]) for cell in rest if cell.endswith(" s")), 2)))
    return sorted(found)


_LEFT: Final = 56
_CHART: Final = 96
_HEADS: Final = {
    "Prometheus": f"Prometheus, every {SCRAPE_SECONDS:.0f} s",
    "status": "epochsink status --json",
    "report": "epochsink report: how long each epoch took until readers saw it",
}


def picture(course: Course) -> str:
    """Draw what the three have shown, one below another, on one axis of time."""
    gone, back = course.away
    peaks = {name: max(one.age for one in seen) for name, seen in course.shown.items()}
    late = sum(took > TRIGGER_SECONDS for _, took in course.epochs)
    title = (
        f"A server {course.how} for {back - gone:.0f} s: {late} of {len(course.epochs)} epochs late, "
        f"{course.missing:,} rows missing, {course.twice:,} twice"
    )
    said = (
        "The age in seconds: "
        + ", ".join(f"{peak:.0f} s at most in {name}" for name, peak in peaks.items())
        + f". In the end {course.rows:,} rows."
    )
    svg = Svg()
    svg.text(16, 30, title, class_="title")
    y = svg.paragraph(16, 54, said, class_="weak") + 6
    colours = {"open": ("blue", "an epoch is under way")}
    if any(one.late >= 1 for seen in course.shown.values() for one in seen):
        colours["late"] = ("red", "an epoch is decided and not visible")
    legend = [*colours.values(), ("grey part", f"the server is {course.how}")]
    y = svg.legend(_LEFT, y, legend) + 8
    most = 20 * math.ceil(max(peaks.values()) / 20)
    end = max(one.at for seen in course.shown.values() for one in seen)

    def x(at: float) -> float:
        return round(_LEFT + max(at, 0.0) / end * (WIDTH - _LEFT - 24), 1)

    for name, seen in course.shown.items():
        svg.text(_LEFT, y + 8, _HEADS[name], class_="head")
        top, bottom = y + 20, y + 20 + _CHART
        svg.box(x(gone), top, x(back) - x(gone), _CHART, class_="grey part")
        for age in (0, most // 2, most):
            level = bottom - age / most * _CHART
            svg.line(_LEFT, level, WIDTH - 24, level, class_="grid")
            svg.text(_LEFT - 8, level + 4, f"{age} s", text_anchor="end", class_="small weak")
        for what, (colour, _) in colours.items():
            points = [(one.at, bottom - getattr(one, what) / most * _CHART) for one in seen if one.at >= 0]
            if name == "Prometheus":
                svg.curve([(x(at), level) for at, level in points], class_=f"{colour} thick")
                continue
            for at, level in points:
                if level < bottom:
                    svg.box(x(at) - 2, round(level, 1), 4, round(bottom - level, 1), class_=colour)
        y = bottom + 18
    for minute in range(int(end / 60) + 1):
        svg.text(x(60 * minute), y, f"{minute} min", class_="small weak", text_anchor="middle")
    return svg.document(y + 14, f"{title}. {said}")


def main() -> None:
    """Run, print the figures, and keep record and picture if a folder is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)s)")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without the server (default: %(default)s)")
    parser.add_argument("--how", choices=["stopped", "frozen"], default="stopped", help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for record and picture")
    parser.add_argument("--draw", action="store_true", help="only draw the record that is there")
    parser.add_argument("--pipeline", nargs=3, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.pipeline:
        dsn, checkpoint, port = said.pipeline
        pipeline(dsn, checkpoint, int(port))
        return
    if said.draw:
        draw(said.keep, said.how)
        return
    course = run(60 * said.minutes, said.away, said.how)
    gone, _ = course.away
    for name, seen in course.shown.items():
        before = max((one.age for one in seen if 0 <= one.at < gone), default=0.0)
        peak = max(seen, key=lambda one: one.age)
        console.print(
            f"AGE {name}: {before:.1f} s at most before, {peak.age:.1f} s at {peak.at:.0f} s, {seen[-1].age:.1f} s at "
            f"the end; {len(seen)} times looked at"
        )
    for at, line in course.headlines:
        console.print(f"{at:.0f} s: {line}")
    console.print(f"started again at {list(course.starts)} s; {course.unanswered} scrapes not answered")
    console.print(f"{course.rows:,} rows, {course.missing} missing, {course.twice} twice")
    if said.keep is not None:
        said.keep.mkdir(parents=True, exist_ok=True)
        kept = {"machine": machine(), "measured": datetime.now(UTC).isoformat(timespec="minutes"), **asdict(course)}
        (said.keep / f"{course.how}.json").write_text(json.dumps(kept) + "\n")
        draw(said.keep, course.how)
    for fault in course.faults():
        console.print(f"[bold red]{fault}")
    sys.exit(1 if course.faults() else 0)


def draw(folder: Path, how: str) -> None:
    """Draw a record that was kept."""
    kept = json.loads((folder / f"{how}.json").read_text())
    seen = {name: [Seen(**one) for one in kept.pop(name)] for name in ("prometheus", "status")}
    del kept["machine"], kept["measured"]
    (folder / f"{how}.svg").write_text(picture(Course(**{**kept, **seen})))


if __name__ == "__main__":
    main()
