"""What the experiments share: services, a pipeline in a process of its own that can be killed, tables and pictures.

An experiment is a script of two functions. ``pipeline`` runs in a process of its own, gets a JSON object, and holds the
Spark session; ``experiment`` starts it, kills it, and compares. `main` tells them apart.
"""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.table import Table as RichTable

from epochsink_devkit.demo.session import jvm_options, session
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres
from epochsink_devkit.services.process import Launch, SupervisedProcess
from epochsink_devkit.svg import COLOURS, WIDTH, Svg, letters

SECONDS: Final = 3600.0
KILLED: Final = 128 + 9
_PARTIAL_FLUSH: Final = 10_000
_TAIL: Final = 40
_FEW: Final = 20
Row = Sequence[object]

WHOLE_SNAPSHOTS: Final[Mapping[str, str]] = {
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "0",
    # snapshots are written beside the stream, when the maintenance comes by: after a minute, if nothing else is said
    "spark.sql.streaming.stateStore.maintenanceInterval": "100ms",
}
"""Settings of the state store that keeps its state in the JVM's memory, and writes it whole each time."""

CHANGELOG: Final[Mapping[str, str]] = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings of RocksDB, which writes what has changed."""

_SNAPSHOTS_LOGGER: Final = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
_SNAPSHOT: Final = re.compile(
    r"Written snapshot file for version (\d+).*?writeSnapshotFile\(\) took (\d+) ms", re.DOTALL
)

console = Console()


@dataclass(frozen=True)
class Table:
    """A table, printed on the terminal and kept as Markdown."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Row]

    def print(self) -> None:
        """Print it."""
        table = RichTable(title=self.title, title_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(_text, row))
        console.print(table)

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.headings, ["---", *("---:" for _ in self.headings[1:])], *(map(_text, row) for row in self.rows)]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Findings:
    """What an experiment found: tables, a picture, and whether every comparison was equal."""

    tables: Sequence[Table]
    exact: bool
    picture: str | None = None


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "NO"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"  # noqa: PLR2004 - digits that say something
        case _:
            return str(value)


@dataclass
class Run:
    """One run of an experiment: how large, where its files are, and the services that it asked for."""

    script: Path
    folder: Path
    full: bool
    small: bool
    stack: ExitStack = field(default_factory=ExitStack)

    def size(self, *, small: int, usual: int, full: int) -> int:
        """Return the number for this run: in the project's tests, by default, with ``--full``."""
        return full if self.full else small if self.small else usual

    def kafka(self) -> str:
        """Return the bootstrap servers of a Kafka: the one that KAFKA names, else one that is started."""
        return os.environ.get("KAFKA") or self.stack.enter_context(LocalKafka(short_lived=True)).bootstrap_servers

    def postgres(self) -> str:
        """Return the DSN of a PostgreSQL: the one that DSN names, else one that is started."""
        return os.environ.get("DSN") or self.stack.enter_context(LocalPostgres()).dsn

    def elasticsearch(self) -> str:
        """Return the URL of an Elasticsearch: the one that ELASTICSEARCH names, else one that is started."""
        return os.environ.get("ELASTICSEARCH") or self.stack.enter_context(LocalElasticsearch(short_lived=True)).url

    def start(self, spec: Mapping[str, Any], failpoint: str = "") -> "Pipeline":
        """Start the script's pipeline in a process of its own, and let it kill itself at a failpoint."""
        armed = {"EPOCHSINK_FAILPOINT": failpoint} if failpoint else {}
        return Pipeline(self, spec, armed)

    def run(self, spec: Mapping[str, Any], failpoint: str = "") -> list[dict[str, Any]]:
        """Run the pipeline to its end, or to the failpoint at which it has to die; return its progress."""
        return self.start(spec, failpoint).wait(KILLED if failpoint else 0)


class Pipeline:
    """One life of a pipeline, which ends with this process at the latest."""

    def __init__(self, run: Run, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._progress = run.folder / "progress.json"
        self._progress.unlink(missing_ok=True)
        self._log = run.folder / "pipeline.log"
        self._log.unlink(missing_ok=True)
        file = run.folder / "spec.json"
        file.write_text(json.dumps({"settings": {}, **spec, "progress": str(self._progress)}))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EPOCHSINK_FAILPOINT")}
        self.process = SupervisedProcess(
            Launch(
                command=[sys.executable, str(run.script), "--pipeline", str(file)],
                log=self._log,
                cwd=run.folder,
                env={**inherited, "PYSPARK_PYTHON": sys.executable, **environment},
            )
        )
        run.stack.callback(self._end)

    def _end(self) -> None:
        if self.process.running:
            self.process.kill()

    def memory_bytes(self) -> int:
        """Return the memory that all its processes hold now."""
        return sum(_resident(process) for process in self.process.tree())

    def wait(self, status: int = 0) -> list[dict[str, Any]]:
        """Wait for its end; return the progress of its epochs, if it came so far. RuntimeError at another status."""
        ended = self.process.wait(SECONDS)
        if ended != status:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL:])
            raise RuntimeError(f"the pipeline ended with status {ended} in place of {status}:\n{tail}")
        if not self._progress.exists():
            return []
        left = json.loads(self._progress.read_text())
        self.processor_seconds: float = left["processor_seconds"]
        progress: list[dict[str, Any]] = left["progress"]
        return progress

    def snapshot_seconds(self) -> dict[int, float]:
        """Return how long the state store in memory wrote at a snapshot of a version: its slowest partition."""
        slowest: dict[int, float] = {}
        for version, took in _SNAPSHOT.findall(self._log.read_text(errors="replace")):
            slowest[int(version)] = max(slowest.get(int(version), 0), int(took) / 1000)
        return slowest


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def spark_session(spec: Mapping[str, Any]) -> SparkSession:
    """Return the session of a pipeline: two local cores if its settings say nothing else."""
    spark = session(jvm_options(), **{"spark.sql.streaming.numRecentProgressUpdates": "100000", **spec["settings"]})
    spark.sparkContext.setLogLevel("WARN")
    # how long a snapshot took is said in the log alone
    logging = spark.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]  # noqa: SLF001 - no other way
    logging.core.config.Configurator.setLevel(_SNAPSHOTS_LOGGER, logging.Level.DEBUG)
    return spark


def finish(query: StreamingQuery, spec: Mapping[str, Any]) -> None:
    """Wait until a query ends; leave behind its progress, and what processor time all processes used since the call."""
    before = _processor_seconds()
    query.awaitTermination()
    used = _processor_seconds() - before
    progress = [json.loads(one.json) for one in query.recentProgress if one.numInputRows]
    Path(spec["progress"]).write_text(json.dumps({"progress": progress, "processor_seconds": used}))


def _processor_seconds() -> float:
    """Return the processor time of this process and all below it, those that ended included."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in [here, *here.children(recursive=True)])


def make_topic(servers: str, topic: str, partitions: int) -> None:
    """Make a topic."""
    admin = AdminClient({"bootstrap.servers": servers})  # a name: without one it is gone before the answer comes
    forever = {"retention.ms": "-1"}  # the messages' times are made up: older ones would be deleted at once
    admin.create_topics([NewTopic(topic, partitions, 1, config=forever)])[topic].result(30)


def produce(servers: str, topic: str, messages: Iterable[tuple[str, str | bytes, int]]) -> None:
    """Produce messages: key, value, timestamp in milliseconds."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20})
    for number, (key, value, timestamp) in enumerate(messages):
        producer.produce(topic, value, key, timestamp=timestamp)
        if number % _PARTIAL_FLUSH == 0:
            producer.flush(60)
    if producer.flush(60):
        raise RuntimeError(f"Kafka did not take all messages of {topic}")


def read_topic(servers: str, topic: str) -> list[Any]:
    """Return the values of a topic, JSON each, as a reader with read_committed sees them."""
    return [json.loads(value) for _, _, value in KafkaReader(servers, topic)._records()]  # noqa: SLF001 - ours


def bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def seconds_of(progress: Iterable[Mapping[str, Any]]) -> float:
    """Return how long epochs took, all steps of a trigger included."""
    milliseconds: int = sum(one["durationMs"]["triggerExecution"] for one in progress)
    return milliseconds / 1000


_LEFT: Final = 90
_CHART: Final = 200


def lines(finding: str, what: str, unit: str, across: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a picture (SVG) of lines; its title is the finding, and below it is ``what`` the lines show."""
    svg = Svg()
    svg.text(16, 30, finding, class_="title")
    svg.text(16, 54, f"{what} in {unit}, by {across}", class_="weak")
    colours = dict(zip(series, COLOURS, strict=False))
    top = svg.legend(_LEFT, 84, [(colours[name], name) for name in series]) + 4
    bottom = top + _CHART
    points = [point for each in series.values() for point in each]
    first, last, most = min(x for x, _ in points), max(x for x, _ in points), max(y for _, y in points) or 1

    def place(x: float, y: float) -> tuple[float, float]:
        share = (x - first) / ((last - first) or 1)
        return round(_LEFT + share * (WIDTH - _LEFT - 50), 1), round(bottom - y / most * _CHART, 1)

    for value in (0.0, most / 2, most):
        _, y = place(first, value)
        svg.line(_LEFT, y, WIDTH - 50, y, class_="grid")
        svg.text(_LEFT - 10, y + 4, short(value), text_anchor="end", class_="small weak")
    for value in sorted({first, (first + last) / 2, last}):
        svg.text(place(value, 0)[0], bottom + 20, short(value), text_anchor="middle", class_="small weak")
    for name, each in series.items():
        placed = [place(x, y) for x, y in each]
        svg.curve(placed, class_=f"{colours[name]} thick")
        if len(each) <= _FEW:
            for (x, y), (across_value, value) in zip(placed, each, strict=True):
                svg.dot(x, y, f"{name}, {short(across_value)}: {_text(value)} {unit}", class_=colours[name])
    return svg.document(bottom + 36, finding)


def bars(finding: str, what: str, values: Mapping[str, float]) -> str:
    """Return a picture (SVG) of horizontal bars; its title is the finding, and below it is ``what`` the bars show."""
    svg = Svg()
    svg.text(16, 30, finding, class_="title")
    svg.text(16, 54, what, class_="weak")
    most = max(values.values()) or 1
    left, y = 26 + max(map(letters, values)), 74
    for name, value in values.items():
        width = value / most * (WIDTH - left - 100)
        svg.text(round(left - 10, 1), y + 16, name, text_anchor="end")
        svg.box(round(left, 1), y, max(width, 1), 22, class_="blue")
        svg.text(round(left + width + 8, 1), y + 16, _text(value))
        y += 32
    return svg.document(y + 6, finding)


def short(value: float) -> str:
    """Return a figure in two digits, or without a fraction."""
    return f"{value:,.0f}" if value >= _FEW or value == round(value) else f"{value:.2g}"


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{date.today().isoformat()}, {psutil.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB"  # noqa: DTZ011 - of here


def _keep(name: str, findings: Findings, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    parts = [table.markdown() for table in findings.tables]
    if findings.picture is not None:
        (kept / f"{name}.svg").write_text(findings.picture)
        parts.append(f"![{findings.tables[0].title}]({name}.svg)")
    (kept / f"{name}.md").write_text("\n\n".join([*parts, f"Measured: {_machine()}."]) + "\n")


def main(
    document: str | None, pipeline: Callable[[dict[str, Any]], None], experiment: Callable[[Run], Findings]
) -> None:
    """Run the experiment, or the pipeline in the process that it started; end with status 1 if not exact."""
    script = Path(sys.argv[0]).absolute()
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="at the size of the original")
    size.add_argument("--small", action="store_true", help="in a few seconds: does it still work?")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave tables and picture there")
    parser.add_argument("--pipeline", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.pipeline is not None:
        pipeline(json.loads(asked.pipeline.read_text()))
        return
    with TemporaryDirectory(prefix=f"{script.stem}-") as folder, ExitStack() as stack:
        findings = experiment(Run(script, Path(folder), asked.full, asked.small, stack))
    for table in findings.tables:
        table.print()
    if asked.keep is not None:
        _keep(script.stem, findings, asked.keep)
    console.print("every comparison is equal" if findings.exact else "[bold red]NOT EXACT")
    sys.exit(0 if findings.exact else 1)
