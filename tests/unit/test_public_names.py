"""What `epochsink` promises by name, and what importing it asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import epochsink

VENDORS = [
    "confluent_kafka",
    "kafka",
    "psycopg",
    "pgpq",
    "elasticsearch",
    "opensearchpy",
    "psutil",
    "tenacity",
    "platformdirs",
]
BLOCKED = f"""
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {VENDORS!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Block())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", epochsink.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(epochsink, name)
    assert isinstance(found, str) if name == "__version__" else found.__name__ == name


def test_the_changelog_begins_with_this_version() -> None:
    headings = (Path(__file__).parents[2] / "CHANGELOG.md").read_text().split("\n## ")
    assert headings[1].startswith(epochsink.__version__)


def test_no_name_is_listed_twice_or_out_of_order() -> None:
    assert epochsink.__all__ == sorted(set(epochsink.__all__))
    in_errors = {name for name in epochsink.__all__ if name not in epochsink._HOMES} - {"__version__"}
    assert all(issubclass(getattr(epochsink, name), epochsink.EpochsinkError) for name in in_errors)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Cassandra'"):
        epochsink.Cassandra  # noqa: B018 - reading it is the test


def test_the_machine_needs_no_vendors_client() -> None:
    """Each destination's client is imported by who uses that destination."""
    modules = "epochsink.protocol.coordinator, epochsink.protocol.commit_thread"
    done = python(f"{BLOCKED}\nimport {modules}\nprint(epochsink.EpochsinkError)")
    assert done.returncode == 0, done.stderr


def test_importing_epochsink_imports_nothing_large() -> None:
    done = python("import epochsink, sys\nprint([m for m in ('pyspark', 'pyarrow', 'pandas') if m in sys.modules])")
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "vendors"),
    [
        ("kafka.committer", ["confluent_kafka", "kafka"]),
        ("postgres.committer", ["psycopg", "pgpq"]),
        ("elasticsearch.connection", ["elasticsearch"]),
        ("opensearch.connection", ["opensearchpy"]),
    ],
)
def test_a_missing_client_is_named(module: str, vendors: list[str]) -> None:
    """Whoever uses a destination without its extra is told which module is missing."""
    done = python(f"{BLOCKED}\nimport epochsink.{module}")
    assert done.returncode != 0
    assert any(f"ImportError: {vendor} is blocked" in done.stderr for vendor in vendors)


def test_each_search_product_needs_its_own_client_only() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['elasticsearch', 'elastic_transport', 'opensearchpy']))"
    done = python(f"{blocked}\nimport epochsink.elasticsearch.committer, epochsink.opensearch")
    assert done.returncode == 0, done.stderr
