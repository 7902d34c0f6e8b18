"""The pipeline that the failure tests kill: one Kafka topic into any sinks. Run as ``python pipeline.py SPEC.json``.

It stamps every row with its epoch and attempt, says in the history what was invoked, returned and raised, processes all
input that there is, and ends. With ``plain`` it writes as users do without epochsink, JDBC append in
foreachBatch: the control experiment, in which the checker has to find duplicates.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas import functions

import epochsink
from epochsink import ExactlyOnce
from epochsink.failpoints import reach
from epochsink_devkit.demo.connect_server import connect, start_server
from epochsink_devkit.demo.session import session
from epochsink_devkit.history import HistoryLog, Workload
from epochsink_devkit.services import spark_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from epochsink.protocol.checkpoint import OpenCheckpoint
    from epochsink.sink import Sink
    from epochsink.spark.query_run import Run


@dataclass(frozen=True)
class Spec:
    """What one run of the pipeline needs to know.

    ``sinks`` has, by name, the class in `epochsink` under "kind" and its options, those of `Avro` under "avro".
    ``plain`` is a JDBC URL and a table.
    ``peer`` is for `scoreboard.process`: the system's name, and where it writes to.
    ``attempts`` is how often Spark tries a task, ``tasks`` how many an epoch has (0: one for each source partition).
    ``options`` are those of `ExactlyOnce`. ``settings`` are Spark's, over those of `start_spark`. ``remote``: by Spark
    Connect, on a server of its own.
    """

    run: str
    driver: str
    history: str
    checkpoint: str
    bootstrap_servers: str
    topic: str
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, str] | None = None
    peer: dict[str, str] = field(default_factory=dict)
    rows_per_epoch: int = 60
    attempts: int = 1
    tasks: int = 0
    jvm_options: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    workload: dict[str, int] = field(default_factory=dict)
    remote: bool = False

    def write(self, path: Path) -> Path:
        """Write the spec as a file."""
        path.write_text(json.dumps(asdict(self)))
        return path


class Witness:
    """Stamps the rows of each foreachBatch call, and says in the history how the call went."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._log = HistoryLog(Path(spec.history))

    def took(self, generation: int) -> None:
        """Say that this driver has taken the ledger."""
        self._log.write("took", run=self._spec.run, driver=self._spec.driver, generation=generation)

    def call(self, function: Callable[[DataFrame, int], None], frame: DataFrame, epoch: int) -> None:
        """Call ``function`` as foreachBatch does, with stamped rows."""
        attempt = uuid.uuid4().hex
        spec = self._spec
        self._log.write("invoked", run=spec.run, driver=spec.driver, epoch=epoch, attempt=attempt)
        try:
            function(frame.selectExpr(*Workload.batch(epoch=epoch, attempt=attempt)), epoch)
        except BaseException as failure:
            self._log.write("raised", attempt=attempt, error=repr(failure)[:2000])
            raise
        self._log.write("returned", attempt=attempt)


class WitnessedExactlyOnce(ExactlyOnce):
    """ExactlyOnce with a witness before it."""

    def __init__(self, witness: Witness, **options: Any) -> None:
        super().__init__(**options)
        self._witness = witness

    def _make_run(
        self, session: SparkSession, opened: OpenCheckpoint, query_id: str, *, join_running: bool | str
    ) -> Run:
        run = super()._make_run(session, opened, query_id, join_running=join_running)
        # the ledger's own number: this process may have been paused since, and another one have taken the ledger
        self._witness.took(run._coordinator.identity(next(iter(self.sinks))).generation)
        return run

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Prepare one epoch of stamped rows."""
        self._witness.call(super().__call__, frame, epoch)


def sinks(spec: Spec) -> Iterator[tuple[str, Sink]]:
    """Make the sinks. `make test ON=opensearch` takes OpenSearch for Elasticsearch."""
    # not by `on_opensearch`, whose class the tasks' processes could not import
    kinds = {"Elasticsearch": "OpenSearch"} if os.environ.get("EPOCHSINK_TESTS_ON_OPENSEARCH") else {}
    for name, options in spec.sinks.items():
        kind = getattr(epochsink, kinds.get(options["kind"], options["kind"]))
        given = {key: value for key, value in options.items() if key not in ("kind", "bulk_bytes", "avro")}
        given |= {key: epochsink.Avro(**value) for key, value in options.get("avro", {}).items()}
        sink = kind(**given)
        if "bulk_bytes" in options:
            # no option of the sink; on the frozen object itself, with which it goes to executors
            object.__setattr__(sink, "bulk_bytes", options["bulk_bytes"])
        yield name, sink


def exactly_once(spec: Spec) -> WitnessedExactlyOnce:
    """Return what the pipeline starts."""
    return WitnessedExactlyOnce(Witness(spec), checkpoint=spec.checkpoint, sinks=dict(sinks(spec)), **spec.options)


def import_less() -> None:
    """Keep PySpark from importing pandas to see its version, and its test tools for one flag: 2 s of each start."""
    functions.__dict__["require_minimum_pandas_version"] = lambda: None
    tools = ModuleType("pyspark.testing.utils")
    tools.__dict__["have_numpy"] = True
    sys.modules |= {"pyspark.testing": ModuleType("pyspark.testing"), tools.__name__: tools}


def start_spark(spec: Spec) -> SparkSession:
    """Start Spark as small and as quickly as it goes."""
    settings = {
        "spark.master": f"local[2,{spec.attempts}]",
        "spark.driver.memory": "512m",
        # to compile a plan takes longer than to interpret it for so few rows
        "spark.sql.codegen.wholeStage": "false",
        "spark.local.dir": f"{spec.history}/spark",
        "spark.sql.warehouse.dir": f"{spec.history}/warehouse",
    }
    if spec.remote:
        settings["spark.driver.extraClassPath"] = ":".join(map(str, spark_packages()))
        return connect(start_server(settings | spec.settings, spec.jvm_options)[1])
    import_less()
    spark = session(spec.jvm_options, **(settings | spec.settings))
    spark.sparkContext.setLogLevel("WARN")
    return spark


def stream(spec: Spec, spark: SparkSession) -> DataFrame:
    """Read the topic, with every proof column that does not depend on the batch."""
    source = spark.readStream.format("kafka").options(
        **{
            "kafka.bootstrap.servers": spec.bootstrap_servers,
            "subscribe": spec.topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(spec.rows_per_epoch),
        }
    )
    rows = source.load().selectExpr(*Workload(**spec.workload).stream(run=spec.run))
    return rows.coalesce(spec.tasks) if spec.tasks else rows


def run(spec: Spec) -> None:
    """Process all input that there is."""
    frame = stream(spec, start_spark(spec))
    writer = frame.writeStream.trigger(availableNow=True)
    if spec.plain is None:
        exactly_once(spec).start(writer).awaitTermination()
        return
    witness = Witness(spec)

    def append(batch: DataFrame, _epoch: int) -> None:
        url, table = spec.plain or ("", "")
        batch.write.jdbc(url, table, mode="append", properties={"driver": "org.postgresql.Driver"})
        reach("coordinator.record.after")

    writer = writer.foreachBatch(lambda batch, epoch: witness.call(append, batch, epoch))
    writer.option("checkpointLocation", spec.checkpoint).start().awaitTermination()


if __name__ == "__main__":
    run(Spec(**json.loads(Path(sys.argv[1]).read_text())))
