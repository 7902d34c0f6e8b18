"""The summary at the head of the fault matrix: how many faults of each kind, in which family, shown by which tests.

PYTHONPATH=tests:tests/instruments python -m proof.matrix      # writes it again
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "docs" / "reference" / "fault-matrix.md"
BEGIN: Final = "<!-- written by proof.matrix -->"
END: Final = "<!-- to here -->"
FAMILIES: Final = ("Kafka", "PostgreSQL", "Elasticsearch", "OpenSearch")
TESTS: Final = {
    "real servers": ("integration", "failure", "instruments"),
    "simulation": ("simulation", "model"),
    "other tests": ("unit", "contract"),
}
"""What shows a fault, and the folders of those tests."""
COLUMNS: Final = ("all", *FAMILIES, *TESTS)
HEAD: Final = (
    "what goes wrong",
    "faults",
    *FAMILIES,
    *TESTS,
)


def on_opensearch(test: str) -> bool:
    """Whether `make test ON=opensearch` runs a test of Elasticsearch's, ``tests/.../test_x.py::test_y``."""
    file, _, name = test.partition("::")
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (patterns,) = re.findall(r"^ON_OPENSEARCH := (.*)$", makefile, re.MULTILINE)
    # those that are skipped there are listed by name
    differs = f'"{name}":' in (ROOT / "tests" / "support" / "on_opensearch.py").read_text()
    return not differs and any(Path(file).match(pattern) for pattern in patterns.split())


def summary(text: str) -> list[str]:
    """Return the lines of the table."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    section = ""
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if section and line.startswith("| ") and not line.startswith("| fault "):
            # the contract of sinks is in the package
            folder = [*re.findall(r"`tests/(\w+)/", line), *re.findall("testing/sink_(contract)", line)][-1]
            by = next(by for by, folders in TESTS.items() if folder in folders)
            of = {family for family in FAMILIES if family == section or re.search(family[:8], line, re.IGNORECASE)}
            if "Elasticsearch" in of and any(map(on_opensearch, re.findall(r"`(tests/[^`]+)`", line))):
                of.add("OpenSearch")
            for place in (section, ""):
                counts[place].update(["all", by, *of])
    rows = [
        [f"[{section}](#{anchor(section)})" if section else "all together", *(f"{found[name]}" for name in COLUMNS)]
        for section, found in [*((one, counts[one]) for one in counts if one), ("", counts[""])]
    ]
    return [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def written(text: str) -> str:
    """Return the page with its summary written again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n" + "\n".join(summary(after)) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
