"""Each command that a hint, an error or a log line names can be typed as it stands: the command line takes it."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from epochsink.cli.app import app
from epochsink.errors import Addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = Path(__file__).parents[2] / "connectors"
ADDRESSES = Addresses("/lake/orders", "pipeline:sink")
VERBS = "|".join(typer.main.get_command(app).commands)  # type: ignore[attr-defined] # it is a group
COMMAND = re.compile(rf"(?<!['`/.])\bepochsink (?:{VERBS})\b[^;,)\n]*")
"""A command ends where the text does, or before one of these: a full stop would be copied with it."""
MENTION = re.compile(rf"(?<=['`])epochsink (?:{VERBS})(?: retry| list| drop)?(?=['`])")
"""A verb that is only mentioned, between quotes."""


def texts(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield each text of a module with its line, and whether it is what an error says to do; no docstrings.

    What is filled in is 4: the number of an epoch, and a name.
    """
    tree = ast.parse(file.read_text())
    skipped = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    hints = {
        id(each)
        for node in ast.walk(tree)
        for each in (
            ast.walk(node.value)
            if (isinstance(node, ast.keyword) and node.arg in {"hint", "command"})
            or (isinstance(node, ast.Assign) and "hint" in ast.unparse(node.targets[0]))
            else ()
        )
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield node.lineno, "".join(_part(part) for part in node.values), id(node) in hints
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in hints


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "--sink 4" if "sink_option(" in ast.unparse(part) else "4"


def named() -> list[Any]:
    """Return every command in a text of the packages, with its place."""
    found = []
    for file in sorted(PACKAGES.rglob("*.py")):
        for line, text, is_hint in texts(file):
            place = f"{file.relative_to(PACKAGES)}:{line}"
            # the whole text: a name, such as that of what a ledger was taken for
            found += [pytest.param(each.strip(), id=place) for each in COMMAND.findall(text) if each != text]
            if is_hint:
                found += [pytest.param(each, id=f"{place}, a name only") for each in MENTION.findall(text)]
    return found


def parse(command: str) -> None:
    """Let the command line parse what is typed, without doing it. Raises what it says of a usage."""
    words = shlex.split(ADDRESSES.complete(command))[1:]
    context: Any = None
    verb: Any = typer.main.get_command(app)
    while hasattr(verb, "commands"):
        context = verb.make_context("epochsink", words, parent=context)
        words = [*context._protected_args, *context.args]
        _, verb, words = verb.resolve_command(context, words)
    verb.make_context(verb.name, words, parent=context)


@pytest.mark.parametrize("command", named())
def test_a_command_in_a_text_is_one_that_can_be_typed(command: str) -> None:
    """With all that it needs, and no full stop at its end."""
    assert not re.search(r"\.(\s|$)", command), command
    parse(command)


@pytest.mark.parametrize("command", ["epochsink repair CHECKPOINT", "epochsink resolve CHECKPOINT 4 --sink a --as b"])
def test_a_command_that_lacks_something_is_noticed(command: str) -> None:
    with pytest.raises(Exception, match=r"Missing parameter: sinks|is not one of"):
        parse(command)
