"""`make bench ONLY=flink`: the Kafka sink against Flink's, on the same broker, with the same rows, in turn.

Both read the same text files and write each line as a message, in two tasks, with the same producer settings, and
both commit once, when all rows are written. Ours is timed as in all benchmarks, from the call of foreachBatch until
the epoch is committed. Flink's job is timed as a whole, in a cluster that runs already; what it takes to start and to
end is taken off by a job of a thousand rows just before. Processor seconds are those of the whole run of each side,
Flink's small job and our small epoch among them.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import bench_kafka
from bench_kafka import AT_ONCE, OURS_TUNED, Broker
from epochs import FILES, FIRST, session
from flink_jars import kafka_jars
from measure import Report, sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

JOB: Final = Path(__file__).with_name("flink_job.py")
PARALLELISM: Final = 2
SMALL: Final = "small"


class Flink:
    """One process with Flink, which runs a job for each request."""

    def __init__(self, python: str, servers: str) -> None:
        said = {
            "jar": kafka_jars()[0],
            "parallelism": PARALLELISM,
            "servers": servers,
            "options": OURS_TUNED,
        }
        self._process = subprocess.Popen(
            [python, str(JOB), json.dumps(said)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, topic: str, guarantee: str) -> float:
        """Write a folder's lines into a topic; return the seconds of the whole job."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("Flink's process has no pipes")
        stdin.write(json.dumps({"folder": folder.as_uri(), "topic": topic, "guarantee": guarantee}) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("FLINK "):
                return float(line.removeprefix("FLINK "))
        raise RuntimeError("Flink's process has ended: see its errors above")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


class Bench(bench_kafka.Bench):
    """The broker, the rows as text, and both ways to write them."""

    def __init__(self, spark: SparkSession, broker: Broker, rows: int, folder: Path) -> None:
        super().__init__(spark, broker, rows, folder)
        self.texts = {name: folder / name for name in (SMALL, "large")}
        sizes_ = {SMALL: (rows, rows + FIRST), "large": (0, rows)}
        for name, (first, last) in sizes_.items():
            frame = spark.read.parquet(self.path).where(f"id >= {first} AND id < {last}").select("payload")
            frame.repartition(FILES).write.text(str(self.texts[name]))
            # Flink reads whatever is in a folder
            for other in (*self.texts[name].glob(".*"), *self.texts[name].glob("_*")):
                other.unlink()

    def rows_of(self) -> DataFrame:
        """Return the stream of the lines: the small folder's, and then those to time."""
        reader = self.spark.readStream.schema("value string").option("maxFilesPerTrigger", FILES)
        return reader.text(str(self.texts[SMALL].parent / f"{{{SMALL},large}}"))

    def flink(self, flink: Flink, guarantee: str) -> Callable[[], float]:
        def run() -> float:
            topic = self.topic()
            start = flink.run(self.texts[SMALL], topic, guarantee)
            whole = flink.run(self.texts["large"], topic, guarantee)
            self.check_and_delete(topic)
            return whole - start

        return run


def main() -> None:
    """Measure both guarantees."""
    options = sizes(__doc__, 4_000_000, python="the Python of an environment that has apache-flink")
    with (
        tempfile.TemporaryDirectory(prefix="epochsink-bench-") as folder,
        Broker(AT_ONCE) as broker,
        session() as spark,
        closing(Flink(options.python, broker.bootstrap_servers)) as flink,
    ):
        bench, report = Bench(spark, broker, options.rows, Path(folder)), Report.of(options)
        ours = bench.ours(options=OURS_TUNED)
        for guarantee, aim in (("exactly-once", 1.3), ("at-least-once", 1.0)):
            report.ratio(f"kafka-vs-flink-{guarantee}", aim, options.rows, ours, bench.flink(flink, guarantee))
        report.print()


if __name__ == "__main__":
    main()
