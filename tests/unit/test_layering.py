"""The dependency rule, and the size that keeps modules small."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import epochsink

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(epochsink.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
FAMILIES = ("kafka", "postgres", "elasticsearch")
WORDS = {"protocol", "errors", "naming", "faults", "arrow"}
STORES = {"files", "ledger", "spool", "checkpoint", "stories", "handover"}
SPARK = {"spark", "run", "execution", "plan", "writejob", "hadoop", "failures", "batches"}
MACHINE = WORDS | STORES | {"coordinator", "watcher"} | SPARK
LONGEST = 400


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Yield each imported module's full name, and whether a running program imports it too."""
    tree = ast.parse(MODULES[module].read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            package = str(node.module)
            names = [f"epochsink.{alias.name}" for alias in node.names] if package == "epochsink" else [package]
        else:
            continue
        for name in names:
            yield name, id(node) not in for_types


def own(module: str) -> set[str]:
    """Return the package's own modules that a module imports, also for types alone."""
    return {name.removeprefix("epochsink.") for name, _ in imports(module) if name.startswith("epochsink.")}


def of_family(module: str) -> str | None:
    head = module.partition(".")[0]
    return head if head in FAMILIES else None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_is_long(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("module", sorted(module for module in MODULES if of_family(module)))
def test_a_family_knows_the_words_and_itself(module: str) -> None:
    """Neither another family, nor the machine, nor Spark: not even for types."""
    allowed = {*WORDS, "spool"}
    strangers = {name for name in own(module) if of_family(name) != of_family(module)} - allowed
    assert strangers == set()
    assert not {name for name, _ in imports(module) if name.partition(".")[0] in ("pyspark", "py4j")}


@pytest.mark.parametrize("module", sorted(WORDS))
def test_the_words_know_nothing_but_words(module: str) -> None:
    assert own(module) <= WORDS


@pytest.mark.parametrize("module", sorted(STORES))
def test_the_stores_know_words_and_stores(module: str) -> None:
    assert own(module) <= WORDS | STORES


@pytest.mark.parametrize("module", ["coordinator", "watcher"])
def test_the_coordinator_knows_no_spark(module: str) -> None:
    assert own(module) <= WORDS | STORES | {"coordinator"}


@pytest.mark.parametrize("module", sorted(SPARK))
def test_the_machine_knows_no_family(module: str) -> None:
    assert own(module) <= MACHINE


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_side_of_spark_touches_spark(module: str) -> None:
    """What the rest needs to run has no JVM in it. Types, services' jars and tests' tools are not the machine."""
    touched = {name for name, runs in imports(module) if runs and name.partition(".")[0] in ("pyspark", "py4j")}
    if module.partition(".")[0] in SPARK | {"services", "testing", "demo", "cli"}:
        return
    if module.startswith("operations."):
        assert touched <= {"pyspark.sql"}, "operations may start a session for a checkpoint that is not local"
        return
    assert touched == set()


def test_every_module_of_the_machine_exists() -> None:
    """The lists above are about this package, not about an older one."""
    assert set(MODULES) >= MACHINE
    command_line = {"__init__", "__main__", "cli", "reporting"}
    roots = {module for module in MODULES if "." not in module} - command_line
    assert roots <= MACHINE
