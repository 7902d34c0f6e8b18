"""The demo's own bookkeeping: a demo that cannot show a failure shows nothing."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import psutil
import pytest
from rich.console import Console

from epochsink.failpoints import POINTS
from epochsink_devkit.demo.destination import Tally, divergent
from epochsink_devkit.demo.display import Display, Result, picture_of
from epochsink_devkit.demo.index import ElasticsearchIndex
from epochsink_devkit.demo.kill_plan import ANY_MOMENT, EXACTLY_ONCE, PLAIN, Kill, plan
from epochsink_devkit.demo.pipeline_process import DemoFailed, PipelineProcess, SuccessiveRuns
from epochsink_devkit.demo.reader import Background, decided_offsets
from epochsink_devkit.demo.scenario import BACKLOG_EPOCHS, RESERVED_EPOCHS, orders_per_epoch
from epochsink_devkit.demo.servers import RunningServers, ServerAddresses
from epochsink_devkit.demo.session import on_cluster
from epochsink_devkit.demo.settings import PipelineSettings
from epochsink_devkit.demo.table import PostgresTable
from epochsink_devkit.demo.topic import KafkaTopic
from epochsink_devkit.page import Course, Sample

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE = 30.0
STEPS = [*EXACTLY_ONCE, *PostgresTable.steps, *ElasticsearchIndex.steps, *KafkaTopic.steps]


def result(count: Tally, early: int = 0, rows_in: int = 100, divergent: int = 0) -> Result:
    return Result("epochsink", "Elasticsearch", 6, rows_in, count, divergent, early, looks=10)


# ---- what counts as exact


def test_only_a_row_of_zeros_is_exact() -> None:
    assert result(Tally(100, 0, 0)).is_exact
    assert not result(Tally(99, 1, 0)).is_exact
    assert not result(Tally(101, 0, 1)).is_exact
    assert not result(Tally(100, 1, 1)).is_exact
    assert not result(Tally(100, 0, 0), early=1).is_exact
    assert not result(Tally(100, 0, 0), divergent=1).is_exact
    assert not result(Tally(100, 0, 0), rows_in=99).is_exact
    left = replace(result(Tally(100, 0, 0)), leftovers=("open transaction epochsink.1",))
    assert not left.is_exact
    assert "left behind: open transaction epochsink.1" in left.in_words()


def test_the_closing_table_fits_a_log_and_names_every_figure() -> None:
    written = io.StringIO()
    wrong = result(Tally(231_072, 12_345, 43_417), early=198_765, rows_in=200_000, divergent=34_567)
    results = [result(Tally(200_000, 0, 0), rows_in=200_000), wrong]
    Display(Console(file=written, width=80)).close(results)
    lines = written.getvalue().splitlines()
    table = [line for line in lines if not line.startswith("epochsink,")]
    assert all(len(line) <= 80 for line in table)
    (heads,) = (line for line in table if "into" in line)
    names = ("rows in", "rows out", "lost", "duplicated", "divergent", "early")
    assert [name for name in names if name not in heads] == []
    for figure in ("231,072", "12,345", "43,417", "34,567", "198,765"):
        assert figure in written.getvalue()
    assert "every order arrived exactly once" in written.getvalue()


def test_the_picture_says_the_finding_and_asks_for_nothing() -> None:
    course = Course(
        (), [Sample(1.0, 0, {"Elasticsearch": 0}), Sample(2.0, 100, {"Elasticsearch": 100})], [(1.5, "here")]
    )
    drawn = picture_of([result(Tally(100, 0, 0))], {"epochsink": course})
    assert "6 times kill -9 each: with epochsink every order arrives exactly once" in drawn
    assert "Elasticsearch: exact" in drawn
    assert set(re.findall(r"https?://[^\"' <]+", drawn)) == {"http://www.w3.org/2000/svg"}


# ---- counting


def test_a_tally_counts_what_is_lost_and_what_came_twice() -> None:
    assert Tally.of(Counter([0, 1, 2]), 3) == Tally(rows_out=3, lost=0, duplicated=0)
    assert Tally.of(Counter([0, 1, 2]), 5) == Tally(rows_out=3, lost=2, duplicated=0)
    assert Tally.of(Counter([0, 1, 2, 2, 1]), 3) == Tally(rows_out=5, lost=0, duplicated=2)


def test_a_row_that_is_no_order_does_not_hide_a_loss() -> None:
    assert Tally.of(Counter([0, 99]), 2) == Tally(rows_out=2, lost=1, duplicated=1)


def test_destinations_diverge_where_one_holds_other_orders_or_more_of_one() -> None:
    assert divergent([Counter([0, 1, 2]), Counter([2, 1, 0])]) == 0
    assert divergent([Counter([0, 1, 2]), Counter([0, 1]), Counter([0, 3])]) == 3
    assert divergent([Counter([0, 1]), Counter([0, 1, 1])]) == 1


# ---- which kills


def test_every_step_comes_before_any_comes_again() -> None:
    kills = plan(STEPS, len(STEPS) + 1, Random(1))
    struck = Counter(kill.point for kill in kills)
    assert struck.keys() == {step.point for step in STEPS}
    assert sorted(struck.values()) == [1] * (len(STEPS) - 1) + [2]
    assert {(kill.point, kill.title) for kill in kills} == {(step.point, step.title) for step in STEPS}


@pytest.mark.parametrize("seed", range(20))
def test_some_steps_are_in_every_plan(seed: int) -> None:
    """Between the sinks' commits, between Kafka's transactions, in the middle of applying to Elasticsearch."""
    points = {kill.point for kill in plan(STEPS, 6, Random(seed))}
    assert points >= {"coordinator.commit.between", "kafka.commit.between", "elasticsearch.bulk.between"}
    assert len(points) == 6


def test_a_seed_repeats_the_kills() -> None:
    assert plan(PLAIN, 9, Random(7)) == plan(PLAIN, 9, Random(7)) != plan(PLAIN, 9, Random(8))


def test_every_step_is_a_crash_point() -> None:
    assert {step.point for step in [*STEPS, *PLAIN]} - {ANY_MOMENT} <= POINTS.keys()


def test_there_are_orders_for_every_kill_to_strike_in() -> None:
    kills = plan(STEPS, 9, Random(3))
    epochs = 200_000 // orders_per_epoch(200_000, kills)
    assert epochs >= sum(kill.most_epochs for kill in kills) + BACKLOG_EPOCHS + RESERVED_EPOCHS


# ---- what is decided


@pytest.mark.parametrize(("version", "source"), [("v1", ""), ("v2", "0:"), ("v2", "orders:")])
def test_offsets_count_once_their_commit_stands(tmp_path: Path, version: str, source: str) -> None:
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
    assert decided_offsets(tmp_path) == {}
    for number, ends in enumerate(('{"0":10,"1":12}', '{"0":20,"1":25}')):
        (tmp_path / "offsets" / str(number)).write_text(
            f'{version}\n{{"batchWatermarkMs":0}}\n{source}{{"orders":{ends}}}'
        )
    (tmp_path / "commits" / "0").write_text("v1\n{}")
    assert decided_offsets(tmp_path) == {0: 10, 1: 12}
    (tmp_path / "commits" / "1").write_text("v1\n{}")
    assert decided_offsets(tmp_path) == {0: 20, 1: 25}


def test_settings_cross_to_another_process(tmp_path: Path) -> None:
    settings = PipelineSettings(
        bootstrap_servers="127.0.0.1:1",
        topic="orders",
        checkpoint="/checkpoint",
        orders_per_epoch=7,
        plain=True,
        jvm_options="-Xmx1g",
        master="local[2]",
        epochs="/epochs.jsonl",
        destinations={
            "table": PostgresTable("dsn", "url", "driver", "orders"),
            "index": ElasticsearchIndex("http://127.0.0.1:2", "orders"),
            "topic": KafkaTopic("127.0.0.1:1", "orders.out"),
        },
    )
    settings.save(tmp_path / "settings.json")
    assert PipelineSettings.load(tmp_path / "settings.json") == settings


# ---- the processes


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "process.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def pids_in(path: Path, count: int) -> list[int]:
    """Wait for a process to have written its process ids."""
    deadline = time.monotonic() + DEADLINE
    while len(found := path.read_text().split() if path.exists() else []) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return [int(pid) for pid in found]


def wait_until_struck(process: PipelineProcess) -> None:
    deadline = time.monotonic() + DEADLINE
    while not process.has_struck():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def test_a_kill_takes_processes_with_a_group_of_their_own_too(tmp_path: Path) -> None:
    """Spark's Python workers leave the driver's process group."""
    with PipelineProcess([*script(tmp_path, FAMILY), str(tmp_path / "pids")], tmp_path / "log") as process:
        pids = pids_in(tmp_path / "pids", 2)
        process.expect_alive()
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_crash_point_strikes_and_is_noticed(tmp_path: Path) -> None:
    text = (
        "from epochsink.failpoints import reach\nreach('coordinator.record.after')\nreach('coordinator.record.after')\n"
    )
    kill = Kill("coordinator.record.after", "recorded", 2, 0.0)
    with PipelineProcess(script(tmp_path, text), tmp_path / "process.log", kill) as process:
        wait_until_struck(process)


def test_a_pipeline_that_ends_by_itself_is_no_kill(tmp_path: Path) -> None:
    kill = Kill("coordinator.record.after", "recorded", 1, 0.0)
    complaint = pytest.raises(DemoFailed, match=r"with status 1; its log ends:\nout of order")
    command = script(tmp_path, "raise SystemExit('out of order')")
    with PipelineProcess(command, tmp_path / "process.log", kill) as process, complaint:
        wait_until_struck(process)


def test_stopping_in_order_needs_status_zero(tmp_path: Path) -> None:
    text = "import sys\nassert sys.stdin.readline() == 'stop\\n'\nraise SystemExit(int(sys.argv[1]))\n"
    with PipelineProcess([*script(tmp_path, text), "0"], tmp_path / "log") as process:
        process.stop()
    with (
        PipelineProcess([*script(tmp_path, text), "3"], tmp_path / "log") as process,
        pytest.raises(DemoFailed, match="status 3"),
    ):
        process.stop()


READY = """
import os, sys
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file, flush=True)
for line in sys.stdin:
    with open(sys.argv[2], "a") as file:
        print(os.getpid(), file=file, flush=True)
"""


def test_the_next_life_gets_ready_and_begins_when_it_is_told(tmp_path: Path) -> None:
    ready, begun = tmp_path / "ready", tmp_path / "begun"
    kill = Kill(ANY_MOMENT, "at a random moment", 1, 0.0)
    with SuccessiveRuns([*script(tmp_path, READY), str(ready), str(begun)], tmp_path, [kill, kill]) as runs:
        for life in range(2):
            with runs.begin():
                pids = set(pids_in(ready, life + 2))
                assert set(pids_in(begun, life + 1)) < pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_life_that_ended_before_it_began_is_found_out(tmp_path: Path) -> None:
    with PipelineProcess(script(tmp_path, "raise SystemExit('no Spark')"), tmp_path / "log") as process:
        process._driver.wait(DEADLINE)
        process.begin()
        with pytest.raises(DemoFailed, match="no Spark"):
            process.expect_alive()


def test_a_pipeline_does_not_outlive_the_demo(tmp_path: Path) -> None:
    """The end of standard input is the death of the demo: the pipeline kills its whole process group."""
    text = (
        "import os, subprocess, sys, threading, time\n"
        "from epochsink_devkit.demo.pipeline import _listen\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}')\n"
        "_listen({'start': threading.Event(), 'stop': threading.Event()})\n"
    )
    pipeline = subprocess.Popen(
        [*script(tmp_path, text), str(tmp_path / "pids")], stdin=subprocess.PIPE, start_new_session=True
    )
    assert pipeline.stdin is not None
    try:
        _, child = pids_in(tmp_path / "pids", 2)
        pipeline.stdin.close()
        assert pipeline.wait(DEADLINE) == -9
        psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], DEADLINE)
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    finally:
        if pipeline.poll() is None:
            os.killpg(pipeline.pid, 9)
            pipeline.wait()


def test_what_ends_a_background_thread_is_raised() -> None:
    class Broken(Background):
        def step(self) -> float | None:
            raise ValueError("broken")

    thread = Broken("broken")
    thread.start()
    thread.end()
    with pytest.raises(ValueError, match="broken"):
        thread.raise_failure()


# ---- servers and a cluster that run already


def test_a_running_server_is_named_to_java_as_it_is_to_python_and_shown_without_its_password() -> None:
    where = ServerAddresses("kafka:19092", "postgresql://app:p%40ss@db:6543/shop?sslmode=disable", "http://search:9200")
    assert where.jdbc_url == "jdbc:postgresql://db:6543/shop?user=app&password=p%40ss"
    assert "ss" not in str(where).replace("postgres", "")


def test_two_demos_on_the_same_servers_do_not_meet() -> None:
    where = ServerAddresses("kafka:19092", "postgresql://app@db/shop", "http://search:9200")
    tables = {RunningServers(where).destinations()["table"] for _ in range(2)}
    assert len(tables) == 2


def test_a_quick_demo_writes_to_one_table_and_kills_where_one_sink_passes() -> None:
    where = ServerAddresses("kafka:19092", "postgresql://app@db/shop", "")
    servers = RunningServers(where, quick=True)
    for destinations in (servers.destinations(), servers.plain_destinations(), servers.upserted_destinations()):
        assert [one.label for one in destinations.values()] == ["PostgreSQL"]
    # a pipeline with one destination never reaches these: the demo would wait for its kill for ever
    alone = {step.point for step in [*EXACTLY_ONCE, *PLAIN] if step.destinations == 1}
    assert {"coordinator.commit.between", "coordinator.vote.between"} & alone == set()


def test_tasks_on_other_hosts_die_at_the_same_failpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHSINK_FAILPOINT", "postgres.copied:2")
    settings = on_cluster("spark://master:7077")
    assert settings["spark.executorEnv.EPOCHSINK_FAILPOINT"] == "postgres.copied:2"
    assert settings["spark.driver.host"] != "127.0.0.1"
    assert on_cluster("local[2]") == {"spark.master": "local[2]"}
