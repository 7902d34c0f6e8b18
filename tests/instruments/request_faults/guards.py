"""Which `raise` statements of the families and of the protocol are reached: by plans, and by other tests.

As a plugin of pytest it notes the test that reaches each first:
``EPOCHSINK_GUARDS=FILE pytest -n 0 -p request_faults.guards tests/unit``.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import epochsink

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pytest

ROOT: Final = Path(epochsink.__file__).parent
ROOMS: Final = ("sink", "protocol", "kafka", "postgres", "elasticsearch")
VARIABLE: Final = "EPOCHSINK_GUARDS"
"""The environment variable that names the file of what is reached: a guard and who reached it on each line."""


@functools.cache
def guards() -> dict[str, dict[int, str]]:
    """Return the name of each guard, by file and line: its file, its function and the error, as a person reads it."""
    found: dict[str, dict[int, str]] = {}
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            lines: dict[int, str] = {}
            _collect(ast.parse(file.read_text()), file.relative_to(ROOT).as_posix(), "", lines)
            if lines:
                found[str(file)] = lines
    return found


def _collect(node: ast.AST, file: str, function: str, lines: dict[int, str]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}".lstrip(".")
        # a bare `raise` passes an error on
        elif isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            lines[child.lineno] = f"{file} {function} {ast.unparse(raised)}"
        _collect(child, file, inner, lines)


class Watch:
    """Notes every guard that a process reaches, once, with whoever `who` says; a process may be killed at any time."""

    def __init__(self, file: Path, who: Callable[[], str]) -> None:
        self._left = {file: dict(lines) for file, lines in guards().items()}
        self._file = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self._who = who

    def begin(self) -> None:
        """Watch this thread, and each that begins later."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        # other files run at their usual speed
        return self._in_line if frame.f_code.co_filename in self._left else None

    def _in_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            guard = self._left[frame.f_code.co_filename].pop(frame.f_lineno, None)
            if guard is not None:
                os.write(self._file, f"{guard}\t{self._who()}\n".encode())
        return self._in_line


def reached(file: Path) -> dict[str, str]:
    """Return who reached each guard first."""
    found: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        guard, _, who = line.partition("\t")
        found.setdefault(guard, who)
    return found


def unreached(file: Path) -> list[str]:
    """Return the guards that nobody reached."""
    return sorted({name for lines in guards().values() for name in lines.values()} - reached(file).keys())


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests."""
    del config
    Watch(Path(os.environ[VARIABLE]), lambda: os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]).begin()
