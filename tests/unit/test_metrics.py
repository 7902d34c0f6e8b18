"""What Prometheus reads of running queries, and that alerts and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from query_state import QueryState

from epochsink.errors import ConfigurationError
from epochsink.metrics import export
from epochsink.protocol.progress import EpochProgress, SinkProgress

DOCKER = Path(__file__).parents[2] / "docker"


def read(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return every sample by name and labels, read over HTTP as Prometheus does."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_a_scrape_tells_how_late_a_query_is_and_what_its_sinks_got() -> None:
    registry = CollectorRegistry()
    total = SinkProgress(rows=5, deleted=1, bytes=80, set_aside=2, replays=3, vote_seconds=0.5, commit_seconds=0.25)
    orders = QueryState(
        pending=(7,),
        late_seconds=4.5,
        open_seconds=5.5,
        epochs=6,
        totals={"table": total},
        recent=(EpochProgress(6, 99.0),),
    )
    export(orders, query="orders", registry=registry)  # type: ignore[arg-type]
    export(QueryState(failure="RowsRejected"), query="other", registry=registry)  # type: ignore[arg-type]
    told = read(registry)
    assert told["epochsink_decided_not_visible_seconds", "orders"] == 4.5
    assert told["epochsink_oldest_open_epoch_seconds", "orders"] == 5.5
    assert told["epochsink_rows_total", "orders", "table"] == 5
    assert told["epochsink_dead_letters_total", "orders", "table"] == 2
    assert told["epochsink_newest_visible_timestamp_seconds", "orders"] == 99.0
    assert (told["epochsink_failed", "orders"], told["epochsink_failed", "other"]) == (0, 1)
    # the next scrape sees the next state
    orders.state["late_seconds"] = 0.0
    assert read(registry)["epochsink_decided_not_visible_seconds", "orders"] == 0.0


def test_a_name_belongs_to_one_query() -> None:
    registry, first = CollectorRegistry(), QueryState()
    export(first, query="orders", registry=registry)  # type: ignore[arg-type]
    export(first, query="orders", registry=registry)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="already the name of another query's metrics"):
        export(QueryState(), query="orders", registry=registry)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana-dashboard.json"])
def test_alerts_and_dashboard_ask_for_metrics_that_exist(name: str) -> None:
    text = (DOCKER / name).read_text()
    if name.endswith("json"):
        json.loads(text)
    registry = CollectorRegistry()
    export(QueryState(totals={"table": SinkProgress()}), query="orders", registry=registry)  # type: ignore[arg-type]
    asked = set(re.findall(r"\bepochsink_\w+", text))
    assert asked
    assert asked <= {sample[0] for sample in read(registry)}


def test_each_alert_says_how_urgent_it_is_and_what_to_type() -> None:
    text = (DOCKER / "alerts.yaml").read_text()
    alerts = re.split(r"^ +- alert: ", text, flags=re.MULTILINE)[1:]
    names = [alert.splitlines()[0] for alert in alerts]
    # in the order in which a person should read them
    assert names[:2] == ["EpochsinkDataIsLate", "EpochsinkQueryFailed"]
    for alert in alerts:
        assert re.search(r"^ +labels: \{severity: (page|ticket)\}$", alert, re.MULTILINE), alert
        assert re.search(r'^ +summary: "\{\{ \$labels\.query \}\}', alert, re.MULTILINE), alert
        assert re.search(r'^ +action: "\w', alert, re.MULTILINE), alert


def test_each_panel_of_the_dashboard_has_a_unit_and_a_place_of_its_own() -> None:
    panels = json.loads((DOCKER / "grafana-dashboard.json").read_text())["panels"]
    assert panels[0]["targets"][0]["expr"].startswith("epochsink_decided_not_visible_seconds")
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        taken |= cells
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert "$query" in target["expr"]
