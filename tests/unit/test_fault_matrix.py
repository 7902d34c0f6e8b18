"""The published fault matrix names a test for every fault, and those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

from proof.matrix import HEAD, written

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "docs" / "reference" / "fault-matrix.md"
TWICE: Final = "also on Connect"
ONCE: Final = "classic only"


def rows() -> list[tuple[str, str, str, str]]:
    """Return (fault, what happens, test, on which kinds of session) of every row of every table."""
    found = []
    for line in MATRIX.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "fault" and len(cells) < len(HEAD):
            assert len(cells) == 3, f"not a row of three cells: {line}"
            test, _, sessions = cells[2].partition(", ")
            found.append((cells[0], cells[1], test.strip("`"), sessions))
    return found


def functions(path: str, classes: list[str]) -> dict[str, ast.FunctionDef]:
    scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for each in classes:
        scope = next(node.body for node in scope if isinstance(node, ast.ClassDef) and node.name == each)
    return {node.name: node for node in scope if isinstance(node, ast.FunctionDef)}


def sessions_of(test: str) -> str:
    """Return what the matrix has to say of the sessions on which a test runs: by its marks."""
    path, _, function = test.partition("::")
    if "\npytestmark = pytest.mark.connect\n" not in (ROOT / path).read_text():
        return ""
    marks = [ast.unparse(mark) for mark in functions(path, [])[function].decorator_list]
    return ONCE if any(mark.startswith("pytest.mark.classic(") for mark in marks) else TWICE


def test_each_fault_has_a_test() -> None:
    lacking = []
    for fault, outcome, test, _ in rows():
        path, _, name = test.partition("::")
        *classes, function = name.split("::")
        if not (fault and outcome) or function not in functions(path, classes):
            lacking.append((fault, test))
    assert lacking == []


def test_each_rule_that_no_change_may_break_has_a_test() -> None:
    named = re.findall(r"^\| [^|]+ \| `(.+?\.py)::(.+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(named) > 10
    for path, name in named:
        *classes, function = name.split("::")
        assert function in functions(path, classes), name


def test_the_summary_is_that_of_the_rows() -> None:
    """Write it again by `PYTHONPATH=tests:tests/instruments python -m proof.matrix`."""
    assert MATRIX.read_text() == written(MATRIX.read_text())
    assert f"| all together | {len(rows())} |" in MATRIX.read_text()


def test_no_fault_is_listed_twice() -> None:
    faults = [fault for fault, *_ in rows()]
    assert sorted(faults) == sorted(set(faults))


def test_each_row_says_whether_its_test_runs_on_spark_connect_too() -> None:
    said = {test: sessions for _, _, test, sessions in rows()}
    assert said == {test: sessions_of(test) for test in said}
    assert {*said.values()} == {TWICE, ONCE, ""}
