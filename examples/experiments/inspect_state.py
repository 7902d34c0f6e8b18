"""Spark's state, the ledger and the target side by side, of a stateful query that was killed between the three.

Spark's state data source reads the state store of the last decided epoch; the ledger says what is prepared and what is
done; the table holds what is committed. After the next start, all three agree.

    python inspect_state.py
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg

from epochsink import ExactlyOnce, Postgres
from experiment import Findings, Run, Table, bars, finish, main, spark_session

FILES: Final = 4


def pipeline(spec: dict[str, Any]) -> None:
    """Count words, or read the state that this has left."""
    spark = spark_session(spec)
    if spec.get("state") is not None:
        state = spark.read.format("statestore").load(spec["checkpoint"])
        rows = state.selectExpr("key.word AS word", "value.count AS number").collect()
        with open(spec["state"], "w") as file:  # noqa: PTH123 - a string out of JSON
            json.dump({row["word"]: row["number"] for row in rows}, file)
        return
    words = spark.readStream.schema("word STRING").option("maxFilesPerTrigger", 1).json(spec["input"])
    counts = words.groupBy("word").count().selectExpr("word", "`count` AS number")
    table = Postgres(spec["dsn"], table="inspected_words", key="word")
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"table": table})
    finish(sink.start(counts.writeStream.outputMode("update").trigger(availableNow=True)), spec)


def experiment(run: Run) -> Findings:
    """Kill it between decision and commit, look at all three, start it again, and look once more."""
    copies = run.size(small=3, usual=1_000, full=100_000)
    source = run.folder / "input"
    source.mkdir()
    for file in range(FILES):
        lines = [json.dumps({"word": word}) for word in ("to", "be", "or", "not") for _ in range(copies)]
        (source / f"{file}.json").write_text("\n".join(lines))
    dsn = run.postgres()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS inspected_words")
        connection.execute("CREATE TABLE inspected_words (word text PRIMARY KEY, number bigint)")
    spec = {"dsn": dsn, "input": str(source), "checkpoint": str(run.folder / "checkpoint")}
    run.run(spec, failpoint="coordinator.commit.before:3")
    killed = _look(run, spec)
    run.run(spec)
    ended = _look(run, spec)
    rows = [("killed between decision and commit", *killed), ("after the next start", *ended)]
    headings = ("", "words in Spark's state", "words in the table", "epochs done, by the ledger")
    expected = FILES * 4 * copies
    behind = killed[0] - killed[1] == 4 * copies
    drawn = {f"{when}: {what}": float(row[at]) for when, *row in rows for at, what in enumerate(("state", "table"))}
    return Findings(
        [Table("State, table and ledger", headings, rows)],
        picture=bars(finding(killed, ended), "words in Spark's state and in the table", drawn),
        exact=ended == (expected, expected, FILES) and behind and killed[2] == 2,  # noqa: PLR2004 - the third was next
    )


def finding(killed: Sequence[int], ended: Sequence[int]) -> str:
    """Return the title of the picture, of what is in state and table after the kill and after the next start."""
    lacks, lacks_then = killed[0] - killed[1], ended[0] - ended[1]
    return f"After a kill the table lacks {lacks:,} words of the state, after a start {lacks_then:,}"


def _look(run: Run, spec: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the sum of the counts in the state and in the table, and how many epochs the ledger calls done."""
    file = run.folder / "state.json"
    run.run({**spec, "state": str(file)})
    state = json.loads(file.read_text())
    with psycopg.connect(spec["dsn"]) as connection:
        ((table,),) = connection.execute("SELECT coalesce(sum(number), 0)::bigint FROM inspected_words").fetchall()
    command = [sys.executable, "-m", "epochsink.cli.app", "status", "--json", spec["checkpoint"]]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = sum(epoch["state"] == "done" for epoch in json.loads(said)["epochs"])
    return sum(state.values()), table, done


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
