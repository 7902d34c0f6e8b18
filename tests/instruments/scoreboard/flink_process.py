"""The job that is killed: one Kafka topic into a sink of Flink's. Run as ``python flink_process.py SPEC.json``.

It runs in an environment of its own that has apache-flink, goes on from the newest checkpoint that is complete, and
reads without end, as Flink jobs do. When a checkpoint has all rows of the plan, it stops with a savepoint, the way to
stop a job for good.
"""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Final

# in the environment of its own
from pyflink.common import Configuration  # type: ignore[import-not-found]
from pyflink.datastream import StreamExecutionEnvironment  # type: ignore[import-not-found]
from pyflink.java_gateway import get_gateway  # type: ignore[import-not-found]
from pyflink.table import StreamTableEnvironment  # type: ignore[import-not-found]
from pyflink.util.java_utils import add_jars_to_context_class_loader  # type: ignore[import-not-found]

from scoreboard.flink_checkpoints import newest

CHECKPOINT_MILLISECONDS: Final = 200
COLUMNS: Final = (
    "run STRING, src_part INT, src_off BIGINT, epoch BIGINT, attempt STRING, key BIGINT, kver BIGINT, op STRING, "
    "crc BIGINT"
).replace(" key ", " `key` ")
ROWS: Final = (
    "SELECT '{run}' AS run, src_part, src_off, CAST(-1 AS BIGINT) AS epoch, '' AS attempt, "
    "src_part * CAST({keys} AS BIGINT) + MOD(src_off * 7919, {keys}) AS `key`, src_off / {keys} AS kver, 'U' AS op, "
    "CAST(-1 AS BIGINT) AS crc FROM source"
)
"""The rows of `epochsink_devkit.history.rows.Workload` without deletes, in Flink's SQL."""

INSERT: Final = "INSERT INTO {target} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
JAVA: Final = """
package scoreboard;
public class Postgres implements
        org.apache.flink.connector.jdbc.JdbcStatementBuilder, org.apache.flink.util.function.SerializableSupplier {
    private final String url;
    public Postgres(String url) { this.url = url; }
    public void accept(Object statement, Object row) throws Exception {
        for (int field = 0; field < 9; field++)
            ((java.sql.PreparedStatement) statement).setObject(
                field + 1, ((org.apache.flink.types.Row) row).getField(field));
    }
    public Object get() {
        org.postgresql.xa.PGXADataSource source = new org.postgresql.xa.PGXADataSource();
        source.setUrl(this.url);
        return source;
    }
}
"""
"""What Flink's JDBC sink needs that Python cannot say: how a row becomes parameters, and where the database is."""


def environment(folder: Path, jars: list[str]) -> StreamTableEnvironment:
    """Return a local cluster with exactly-once checkpoints that are kept, which starts from the newest of them."""
    settings = {
        "parallelism.default": "2",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.interval": f"{CHECKPOINT_MILLISECONDS} ms",
        "execution.checkpointing.dir": folder.as_uri(),
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        # more than one, so that who looks on sees each of them
        "execution.checkpointing.num-retained": "20",
        "pipeline.jars": ";".join(jars),
        "rest.bind-port": "0",
    }
    before = newest(folder)
    if before is not None:
        settings["execution.state-recovery.path"] = before.folder.as_uri()
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    return StreamTableEnvironment.create(StreamExecutionEnvironment.get_execution_environment(configuration))


def read(tables: StreamTableEnvironment, spec: dict[str, Any]) -> None:
    """Declare the source."""
    tables.execute_sql(
        "CREATE TABLE source (src_part INT METADATA FROM 'partition' VIRTUAL, src_off BIGINT METADATA FROM 'offset' "
        f"VIRTUAL, nothing BYTES) WITH ('connector' = 'kafka', 'topic' = '{spec['topic']}', 'format' = 'raw', "
        f"'properties.bootstrap.servers' = '{spec['bootstrap_servers']}', 'properties.group.id' = '{spec['topic']}', "
        "'scan.startup.mode' = 'earliest-offset')"
    )


def write_to_kafka(tables: StreamTableEnvironment, rows: str, peer: dict[str, str]) -> Any:
    """Start the job with the KafkaSink; return its client."""
    tables.execute_sql(
        f"CREATE TABLE target ({COLUMNS}) WITH ('connector' = 'kafka', 'topic' = '{peer['target']}', "
        f"'properties.bootstrap.servers' = '{peer['servers']}', 'format' = 'json', "
        f"'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = '{peer['target']}', "
        f"'properties.transaction.timeout.ms' = '{1000 * int(peer['transaction_timeout'])}')"
    )
    return tables.execute_sql(f"INSERT INTO target {rows}").get_job_client()


def write_to_postgres(tables: StreamTableEnvironment, rows: str, peer: dict[str, str]) -> Any:
    """Start the job with the JDBC sink in XA transactions; return its client."""
    jvm = get_gateway().jvm
    jdbc = jvm.org.apache.flink.connector.jdbc
    postgres = jvm.scoreboard.Postgres(peer["jdbc_url"])
    options = jdbc.JdbcExactlyOnceOptions.builder().withTransactionPerConnection(True).build()  # noqa: FBT003 - Java
    sink = (
        jdbc.core.datastream.sink.JdbcSink.builder()
        .withQueryStatement(INSERT.format(target=peer["target"]), postgres)
        .withExecutionOptions(jdbc.JdbcExecutionOptions.builder().withMaxRetries(0).build())
        .buildExactlyOnce(options, postgres)
    )
    stream = tables.to_data_stream(tables.sql_query(rows))
    stream._j_data_stream.sinkTo(sink)
    return StreamExecutionEnvironment(stream._j_data_stream.getExecutionEnvironment()).execute_async()


def compiled(jars: list[str], jar: Path) -> str:
    """Compile the Java into a jar, with the compiler that Flink has for its own SQL; return its path."""
    add_jars_to_context_class_loader(jars)
    jvm = get_gateway().jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(JAVA)
    with zipfile.ZipFile(jar, "w") as file:
        for name, code in compiler.getBytecodes().items():
            file.writestr(f"{name.replace('.', '/')}.class", bytes(code))
    return jar.as_uri()


def main() -> None:
    """Run until all rows of the plan are in a checkpoint, or somebody kills it."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    peer, folder = spec["peer"], Path(spec["checkpoint"])
    jars = [Path(jar).as_uri() for jar in peer["jars"].split(";")]
    if "jdbc_url" in peer:
        jars.append(compiled(jars, folder.parent / "postgres.jar"))
        add_jars_to_context_class_loader(jars)
    tables = environment(folder, jars)
    read(tables, spec)
    rows = ROWS.format(run=spec["run"], keys=spec["workload"]["keys"])
    job = (write_to_postgres if "jdbc_url" in peer else write_to_kafka)(tables, rows, peer)
    wanted = int(peer["rows_of_partition"])
    while (seen := newest(folder)) is None or min(seen.ends.values()) < wanted:
        if job.get_job_status().result().name in ("FAILED", "FINISHED", "CANCELED"):
            job.get_job_execution_result().result()
        time.sleep(0.1)
    # pyflink's own method lacks an argument that this version of Flink wants
    savepoint = get_gateway().jvm.org.apache.flink.core.execution.SavepointFormatType.CANONICAL
    job._j_job_client.stopWithSavepoint(False, str(folder.parent), savepoint).get()  # noqa: FBT003 - Java


if __name__ == "__main__":
    main()
