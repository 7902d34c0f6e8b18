"""The published fault matrix names a test for every fault, and those tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "docs" / "reference" / "fault-matrix.md"


def rows() -> list[tuple[str, str, str]]:
    """Return (fault, what happens, test) of every row of every table."""
    found = []
    for line in MATRIX.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "fault":
            assert len(cells) == 3, f"not a row of three cells: {line}"
            found.append((cells[0], cells[1], cells[2].strip("`")))
    return found


def functions(path: str, classes: list[str]) -> set[str]:
    scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for each in classes:
        scope = next(node.body for node in scope if isinstance(node, ast.ClassDef) and node.name == each)
    return {node.name for node in scope if isinstance(node, ast.FunctionDef)}


def test_each_fault_has_a_test() -> None:
    lacking = []
    for fault, outcome, test in rows():
        path, _, name = test.partition("::")
        *classes, function = name.split("::")
        if not (fault and outcome) or function not in functions(path, classes):
            lacking.append((fault, test))
    assert lacking == []


def test_no_fault_is_listed_twice() -> None:
    faults = [fault for fault, _, _ in rows()]
    assert sorted(faults) == sorted(set(faults))
