"""A real Prometheus scrapes what the library exports, loads the alert rules, and answers the dashboard's questions."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from query_state import QueryState
from waiting import wait_until

from epochsink.metrics import export
from epochsink.protocol.progress import EpochProgress, SinkProgress
from epochsink_devkit.services.ports import free_port
from epochsink_devkit.services.process import Launch, SupervisedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCKER: Final = Path(__file__).parents[3] / "docker"
PANELS: Final = json.loads((DOCKER / "grafana-dashboard.json").read_text())["panels"]
DEADLINE: Final = 60.0


class Prometheus:
    """A running server, and the state of the query that it scrapes each second."""

    def __init__(self, url: str, query: QueryState) -> None:
        self._url = url
        self.query = query

    def ask(self, path: str) -> Any:
        """Return the data of an answer of its interface; None if it does not listen yet."""
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=20) as answer:  # noqa: S310 - ours
                return json.load(answer)["data"]
        except OSError:
            return None

    def lines(self, expression: str) -> list[Any]:
        """Return what an expression shows now."""
        found: dict[str, list[Any]] = self.ask(f"query?query={urllib.parse.quote(expression)}")
        return found["result"]

    def firing(self) -> dict[tuple[str, str], str]:
        """Return the summary of each alert that fires, by its name and sink."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("sink", "")): alert["annotations"]["summary"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed; it is in Debian's package of that name"
    registry = CollectorRegistry()
    query = QueryState(totals={"table": SinkProgress()}, recent=(EpochProgress(6, 99.0),))
    export(query, query="orders", registry=registry)  # type: ignore[arg-type]
    server, thread = start_http_server(0, "127.0.0.1", registry)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DOCKER / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "orders", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
        ],
    }
    file, log, port = tmp_path / "prometheus.json", tmp_path / "log", free_port()
    file.write_text(json.dumps(config))
    command = [
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = SupervisedProcess(Launch(command=command, log=log, cwd=tmp_path, env=os.environ))
    try:
        running = Prometheus(f"http://127.0.0.1:{port}", query)
        wait_until(lambda: running.ask("targets"), log.read_text)
        yield running
    finally:
        process.kill()
        server.shutdown()
        server.server_close()
        thread.join(20)


def test_prometheus_loads_the_rules_and_shows_each_line_of_the_dashboard(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: {rule["health"] for rule in rules()} == {"ok"}, rules)
    assert len(rules()) == 7
    asked = [target["expr"].replace("$query", "orders") for panel in PANELS for target in panel["targets"]]
    wait_until(
        lambda: all(len(prometheus.lines(expression)) == 1 for expression in asked),
        lambda: [expression for expression in asked if not prometheus.lines(expression)],
    )
    assert prometheus.firing() == {}


def test_prometheus_raises_an_alert_for_a_failure_and_for_a_replay_in_a_first_epoch(prometheus: Prometheus) -> None:
    wait_until(lambda: prometheus.lines("epochsink_failed"), lambda: prometheus.ask("targets"))
    assert prometheus.firing() == {}
    prometheus.query.state["failure"] = "RowsRejected"
    prometheus.query.state["totals"] = {"table": SinkProgress(), "topic": SinkProgress(replays=2)}
    expected = {
        ("EpochsinkQueryFailed", ""): "orders has stopped with a failure; nothing is lost",
        ("EpochsinkReplays", "topic"): "orders, sink topic: the target lost prepared rows; they were written again",
    }
    wait_until(lambda: prometheus.firing() == expected, prometheus.firing)
