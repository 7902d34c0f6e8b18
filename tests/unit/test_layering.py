"""The rooms of the package, and who may import whom."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import epochsink
import epochsink_devkit

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(epochsink.__file__).parent
DEVKIT: Final = "epochsink_devkit"


def modules_of(folder: Path, prefix: str = "") -> dict[str, Path]:
    names = {
        path: path.relative_to(folder).with_suffix("").as_posix().replace("/", ".") for path in folder.rglob("*.py")
    }
    return {prefix + name: path for path, name in names.items()}


LIBRARY: Final = modules_of(ROOT)
MODULES: Final = LIBRARY | modules_of(Path(epochsink_devkit.__file__).parent, f"{DEVKIT}.")
"""Those of the library by their name within it, those of the devkit by their full name."""

ROOMS: Final[dict[str, tuple[str, ...]]] = {
    DEVKIT: ("cli", "testing", "spark", "kafka", "postgres", "elasticsearch", "opensearch", "protocol", "words"),
    "cli": ("spark", "kafka", "postgres", "elasticsearch", "opensearch", "protocol", "words"),
    "testing": ("spark", "protocol", "words"),
    "metrics": ("spark", "protocol", "words"),
    "spark": ("protocol", "words"),
    "kafka": ("words",),
    "postgres": ("words",),
    "elasticsearch": ("words",),
    "opensearch": ("elasticsearch", "words"),
    "protocol": ("words",),
    "words": (),
}
"""Each room, and the rooms that it may import from, for types too. The first one is a package beside the library.
``words`` are the modules at the package's root, and those of the folders in `WORDS`."""
WORDS: Final = {"sink"}
FAMILIES: Final = ("kafka", "postgres", "elasticsearch")

SPARK_ROOMS: Final = {"spark", "testing", DEVKIT, "cli"}
"""Who may import PySpark or py4j when it runs: services use its jars, the command line starts a session."""
PRIVATE_TO_PYSPARK: Final = {
    "_jvm",
    "_jsparkSession",
    "_gateway",
    "_df",
    "_jdf",
    "_jsq",
    "_jwrite",
    "_jc",
    "_jsc",
    "_sc",
}
PRIVATE_TO_SPARK: Final = {"sessionState", "sharedState", "streamingQuery", "queryExecutionThread", "queryExecution"}
KNOWS_PYSPARK: Final = {"spark.classic.compat", "spark.classic.stream_execution"}
ROOT_MODULES: Final = 9


def room_of(module: str) -> str:
    head, dot, _ = module.partition(".")
    return head if (dot or head in ROOMS) and head not in WORDS else "words"


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
            names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in for_types


def own(module: str) -> set[str]:
    """Return the package's own modules that a module imports, also for types alone."""
    found = set()
    for name, _ in imports(module):
        inner = name.removeprefix("epochsink.")
        if inner == name and not name.startswith(DEVKIT):
            continue
        for known in (inner, inner.rpartition(".")[0]):
            if known in MODULES or f"{known}.__init__" in MODULES:
                found.add(known if known in MODULES else f"{known}.__init__")
                break
    return found - {module}


def test_nothing_in_the_library_knows_the_devkit_but_the_command_that_loads_it() -> None:
    """What runs in production neither downloads nor starts servers."""
    knowing = {module for module, path in LIBRARY.items() if DEVKIT in path.read_text()}
    assert knowing == {"cli.devkit"}


def test_the_root_holds_few_modules() -> None:
    assert len([module for module in LIBRARY if "." not in module]) <= ROOT_MODULES


def test_arrows_point_down() -> None:
    """Nothing imports from a room that the table does not name for it: neither to run nor for types."""
    strangers = {
        (module, name)
        for module in MODULES.keys() - {"__init__"}
        for name in own(module)
        if room_of(name) not in (room_of(module), *ROOMS[room_of(module)])
    }
    assert strangers == set()


def test_there_is_no_circle() -> None:
    """Imports for types alone count: what must know its user's types belongs into one module with them."""
    graph = {module: own(module) for module in MODULES if module != "__init__"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_only_the_side_of_spark_touches_spark() -> None:
    touched = {
        (module, name)
        for module in MODULES
        if room_of(module) not in SPARK_ROOMS
        for name, runs in imports(module)
        if runs and name.partition(".")[0] in ("pyspark", "py4j")
    }
    assert touched == set()


def test_only_the_classic_engine_knows_the_jvm() -> None:
    """The rest of the room must work where there is no JVM, and no py4j."""
    importing = {
        module
        for module in MODULES
        if room_of(module) == "spark" and not module.startswith("spark.classic.")
        for name, _ in imports(module)
        if name.partition(".")[0] == "py4j"
    }
    assert importing == set()
    for engine, others in (
        ("spark.classic", {"spark.engines"}),
        ("spark.connect", {"spark.engines", "spark.exactly_once"}),
    ):
        knowing = {one for one in MODULES if room_of(one) == "spark" for name in own(one) if name.startswith(engine)}
        assert {module for module in knowing if not module.startswith(engine)} == others


def test_what_is_not_classic_calls_no_jvm() -> None:
    """Spark Connect has none, and the engine's interface must not ask for one."""
    used = {
        (module, node.attr)
        for module in MODULES
        if room_of(module) == "spark" and not module.startswith("spark.classic.")
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute)
        if (node.attr.startswith("_j") or node.attr in ("_gateway", "_sc", "sparkContext"))
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert used == set()


def test_what_pyspark_keeps_private_is_used_in_two_modules() -> None:
    """A new version of PySpark is tried, and fitted, there alone; `spark.query_plan` needs no JVM."""
    used = {
        (module, node.attr)
        for module in MODULES.keys() - KNOWS_PYSPARK
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        if node.attr in PRIVATE_TO_PYSPARK | PRIVATE_TO_SPARK
    }
    imported = {
        (module, name)
        for module in MODULES.keys() - KNOWS_PYSPARK - {"spark.query_plan"}
        for name, _ in imports(module)
        if name.startswith("pyspark.sql.pandas")
    }
    assert used | imported == set()


def test_families_have_the_same_files() -> None:
    """A reader who knows one family knows where to look in the others."""
    same = ("sink", "config", "committable", "writer", "committer", "preflight", "errors", "applied_epochs")
    assert [f"{family}.{name}" for family in FAMILIES for name in same if f"{family}.{name}" not in MODULES] == []


def test_a_configuration_knows_nothing_of_its_family() -> None:
    known = {(family, name) for family in FAMILIES for name in own(f"{family}.config") if room_of(name) == family}
    assert known == set()


def test_the_table_names_every_room() -> None:
    """The table above is about these packages, not about older ones."""
    assert {room_of(module) for module in MODULES} == set(ROOMS)
    folders = ROOMS.keys() - {DEVKIT, "words", "metrics"}  # the last one is a module
    assert all((ROOT / room).is_dir() for room in folders)
