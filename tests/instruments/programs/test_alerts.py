"""The alert rules and the dashboard in docker/, evaluated by Prometheus' own promtool on what the library exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry
from query_state import QueryState

from epochsink.metrics import export
from epochsink.protocol.progress import EpochProgress, SinkProgress

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

DOCKER: Final = Path(__file__).parents[3] / "docker"
CASES: Final = Path(__file__).with_name("alerts_test.yaml")
ALERTS: Final[list[dict[str, Any]]] = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS: Final[list[dict[str, Any]]] = json.loads((DOCKER / "grafana-dashboard.json").read_text())["panels"]
EXPRESSIONS: Final = [target["expr"] for panel in PANELS for target in panel["targets"]]


def promtool(*arguments: str) -> str:
    """Return what promtool says; it has to succeed."""
    program = shutil.which("promtool")
    assert program, "promtool is not installed; it is in Debian's package prometheus"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def exported() -> list[Sample]:
    """Return a sample of every series that the library exports for a query with a sink."""
    registry = CollectorRegistry()
    query = QueryState(totals={"table": SinkProgress()}, recent=(EpochProgress(6, 99.0),))
    export(query, query="orders", registry=registry)  # type: ignore[arg-type]
    return [sample for family in registry.collect() for sample in family.samples]


def count_series(expression: str, exported: list[Sample], folder: Path) -> None:
    """Let promtool evaluate an expression over what the library exports; it has to return one series."""
    series = {f"{one.name}{{{_labels(one)}}}": "1+1x60" for one in exported}
    evaluate(f"count({expression})", series, 1, folder)


def evaluate(expression: str, series: dict[str, str], value: float, folder: Path) -> None:
    """Let promtool evaluate an expression after a quarter of an hour; it has to return a value without labels."""
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": value}]}
        ],
    }
    file = folder / "expression.json"
    file.write_text(json.dumps({"tests": [test]}))
    promtool("test", "rules", str(file))


def _labels(sample: Sample) -> str:
    return ",".join(f'{name}="{value}"' for name, value in sample.labels.items())


def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", str(DOCKER / "alerts.yaml"))


def test_alerts_fire_when_they_should_and_say_what_to_type() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(CASES))


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    fired = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}
    assert fired == {(alert["alert"], fires) for alert in ALERTS for fires in (False, True)}


def test_the_cases_have_the_names_and_labels_that_the_library_exports(exported: list[Sample]) -> None:
    asked = {each["series"] for test in yaml.safe_load(CASES.read_text())["tests"] for each in test["input_series"]}
    found = {re.sub(r'="[^"]*"', "", series) for series in asked}
    assert found
    assert found <= {f"{one.name}{{{','.join(one.labels)}}}" for one in exported}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_expression_of_the_dashboard_shows_a_line_of_what_the_library_exports(
    expression: str, exported: list[Sample], tmp_path: Path
) -> None:
    count_series(expression.replace("$query", "orders"), exported, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        "epochsink_epochs",
        'epochsink_epochs_total{sink="table"}',
        "rate(epochsink_vote_seconds_total[5m]) / rate(epochsink_epochs_total[5m])",
    ],
)
def test_an_expression_whose_name_or_label_is_wrong_shows_none(
    wrong: str, exported: list[Sample], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"got: *nil"):
        count_series(wrong, exported, tmp_path)


@pytest.mark.parametrize("metric", ["epochsink_replays_total", "epochsink_dead_letters_total"])
@pytest.mark.parametrize(("values", "shown"), [("_x55 3x60", 3), ("3x60", 0), ("0x45 3x60", 3)])
def test_the_dashboard_shows_what_goes_wrong_in_the_first_epoch_of_a_run(
    metric: str, values: str, shown: float, tmp_path: Path
) -> None:
    """Its series begins with it, so there is no lower value from which it has risen."""
    (expression,) = [each.replace("$query", "orders") for each in EXPRESSIONS if metric in each]
    evaluate(f"round(sum({expression}))", {f'{metric}{{query="orders",sink="table"}}': values}, shown, tmp_path)
