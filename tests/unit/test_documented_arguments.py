"""Each argument of a constructor has a line in its docstring and a row on its reference page, no more no less."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import epochsink

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PAGES = {
    "ExactlyOnce": "exactly-once.md",
    "Kafka": "kafka.md",
    "Postgres": "postgres.md",
    "Elasticsearch": "elasticsearch.md",
    "OpenSearch": "opensearch.md",
}


def parameters(owner: Any) -> list[str]:
    return list(inspect.signature(owner).parameters)


def described(owner: Any) -> list[str]:
    """Return the names below `Args:`, of which each begins a line that is indented once."""
    block = re.search(r"^Args:\n((?:    .*\n?|\n)+)", inspect.getdoc(owner) or "", re.MULTILINE)
    assert block is not None, f"{owner.__name__} has no Args:"
    return re.findall(r"^    (\w+): \S", block[1], re.MULTILINE)


def listed(page: str) -> list[str]:
    """Return the names in the first table below the heading `Arguments`."""
    _, heading, rest = (DOCS / page).read_text().partition("\n## Arguments\n")
    assert heading, f"{page} has no section Arguments"
    return re.findall(r"^\| `(\w+)` \|", rest.partition("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("name", [*PAGES, "Avro", "NewTopic"])
def test_the_docstring_names_every_argument(name: str) -> None:
    owner = getattr(epochsink, name)
    assert described(owner) == parameters(owner)


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_page_names_every_argument(name: str) -> None:
    assert listed(PAGES[name]) == parameters(getattr(epochsink, name))
