"""Each command that an error or a look names is one that the command line takes: verb, options, and their number."""

from __future__ import annotations

import ast
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import typer.main
from typer.core import TyperGroup

from epochsink.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "connectors/epochsink"
COMMANDS = typer.main.get_group(app)
WORD = re.compile(r"--[a-z-]+|[A-Z_]+(:[A-Z_]+)?|[0-9]+|none|discard|committed|replay")
"""What may follow a verb; the first other word ends the command and goes on with the sentence."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with a number in place of what is filled in."""
    nodes = list(ast.walk(tree))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(filled, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def filled(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "--sink 7" if "sink_option" in ast.unparse(part) else "7"


def arguments(words: list[str]) -> Iterator[str]:
    for word in takewhile(lambda word: WORD.fullmatch(word.strip("'").rstrip(".,;:)'")), words):
        bare = word.strip("'").rstrip(".,;:)'")
        yield bare
        if not word.endswith((bare, f"'{bare}'")):  # a sign ends the command
            return


def named() -> Iterator[tuple[str, list[str]]]:
    """Yield the file of each command that has an argument, and its words."""
    verbs = "|".join(COMMANDS.commands)
    for path in sorted(SOURCE.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            for command in re.finditer(rf"epochsink ((?:letters (?:list|retry|drop)|{verbs}) .*)", text, re.DOTALL):
                words = command[1].split()
                verb = words[: 2 if words[0] == "letters" else 1]
                if given := list(arguments(words[len(verb) :])):
                    yield path.name, [*verb, *given]


def test_each_command_that_an_error_names_is_one_that_the_command_line_takes() -> None:
    """Not run, because the state that raised it is missing: parsed, as the command line does before it runs it."""
    found = list(named())
    assert len(found) > 40
    wrong = []
    for file, words in found:
        command, rest = COMMANDS.commands[words[0]], words[1:]
        if isinstance(command, TyperGroup):
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(words[0], list(rest))
        except Exception as refused:  # noqa: BLE001 - of click, or of typer's copy of it
            wrong.append(f"{file}: epochsink {' '.join(words)}: {refused}")
    assert not wrong, "\n".join(wrong)
