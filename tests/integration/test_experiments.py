"""The founding experiments run, at their smallest, and find every comparison equal; CI runs a share of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shares import SHARE

if TYPE_CHECKING:
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

EXAMPLES = Path(__file__).parents[2] / "examples" / "experiments"
EXPERIMENTS = [
    "windowed_counts_kafka",
    "late_rows",
    "output_commit",
    "rescale",
    "back_pressure",
    "inspect_state",
    "distinct_strings",
    "state_backends",
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*SHARE.of(EXPERIMENTS)])
def test_an_experiment_is_exact(
    name: str,
    kafka: KafkaService,
    postgres: PostgresService,
    elasticsearch: ElasticsearchService,
    tmp_path: Path,
) -> None:
    servers = {"KAFKA": kafka.bootstrap_servers, "DSN": postgres.dsn, "ELASTICSEARCH": elasticsearch.url}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--small", "--keep", tmp_path],
        env={**os.environ, **servers},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "every comparison is equal" in done.stdout
    page = (tmp_path / f"{name}.md").read_text()
    assert page.count("|") > 0
    assert f"({name}.svg)" in page
    assert (tmp_path / f"{name}.svg").exists()
