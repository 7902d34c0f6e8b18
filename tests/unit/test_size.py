"""How large the rooms are, and what is named how: what makes a room larger or a name stand twice says so in a table."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import epochsink
from epochsink.sink import Operator, Participant

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTORS: Final = Path(epochsink.__file__).parents[1]
LINES: Final = {
    "cli": 3100,
    "elasticsearch": 6500,
    "epochsink": 1190,
    "epochsink_devkit": 8000,
    "kafka": 8200,
    "opensearch": 300,
    "postgres": 7600,
    "protocol": 5200,
    "sink": 1530,
    "spark": 4600,
    "testing": 1100,
}
"""At most this many lines of Python in each room, to the next hundred. A change that needs more raises the number here,
with the reason in its commit; one that needs less lowers it."""
DOUBLES: Final[dict[str, int]] = {}
"""Public class names that more than one module has, and how many. One word means one thing: this list only shrinks."""


def room_of(file: Path) -> str:
    package, *folders = file.relative_to(CONNECTORS).parts[:-1]
    return package if package != "epochsink" or not folders else folders[0]


def files() -> Iterator[Path]:
    return CONNECTORS.glob("epochsink*/**/*.py")


def test_no_room_has_grown() -> None:
    lines: dict[str, int] = defaultdict(int)
    for file in files():
        lines[room_of(file)] += len(file.read_text().splitlines())
    assert lines.keys() == LINES.keys()
    assert {room: count for room, count in lines.items() if count > LINES[room]} == {}


def test_the_contract_is_small() -> None:
    """What the engine calls, what operators ask, and what both of them read."""
    methods = {kind: [name for name in vars(kind) if not name.startswith("_")] for kind in (Participant, Operator)}
    assert all(callable(getattr(kind, name)) for kind, names in methods.items() for name in names)
    assert (len(methods[Participant]), len(methods[Operator])) == (14, 6)
    participant: Any = SimpleNamespace()
    Participant.__init__(participant, {})
    assert vars(participant).keys() == {"members", "identities", "require_ours"}


def test_no_class_name_stands_twice_that_did_not_before() -> None:
    names = Counter(
        node.name
        for file in files()
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name: count for name, count in names.items() if count > 1} == DOUBLES


def test_variables_are_nouns() -> None:
    """Not what was found, told, made or asked, but what it is."""
    participles = {"found", "told", "made", "asked"}
    assert [
        f"{file.relative_to(CONNECTORS)}:{node.lineno} {node.id}"
        for file in CONNECTORS.glob("epochsink/**/*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in participles
    ] == []
