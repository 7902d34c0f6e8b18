"""The commands in the texts of the library, each with its place, and the states in which tests type them.

A test declares which places a state shows; the texts of its error are compared with those in the source.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from typer.testing import CliRunner

import epochsink
from epochsink.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from typer.testing import Result

    from epochsink.errors import Addresses, EpochsinkError

    _State = TypeVar("_State", bound=Callable[..., EpochsinkError])

LIBRARY: Final = Path(epochsink.__file__).parent
VERBS: Final = "|".join(typer.main.get_command(app).commands)  # type: ignore[attr-defined] # it is a group
COMMAND: Final = re.compile(rf"(?<!['`/.\w])epochsink ({VERBS})\b(?: (list|retry|drop)\b)?[^;,)\n]*")
"""A command, with its verb; between quotes it is only mentioned. It ends where `Addresses.complete` says."""
OTHERS: Final = re.compile(r"\b(psql|curl|kafka-[a-z-]+\.sh)\b")
"""Programs of others that a text says to type."""
LOOKS: Final = frozenset({"status", "audit"})
ASKS: Final = frozenset({"recover", "repair", "resolve", "accept", "abandon", "drop"})
_FILLED: Final = re.compile(r"\x00|ITS_CHECKPOINT|ITS_MODULE:ATTRIBUTE|CHECKPOINT|MODULE:ATTRIBUTE|--sink NAME")


@cache
def places() -> dict[str, re.Pattern[str]]:
    """Return every place with a command, as "file function: verb", and the text that stands there.

    Of several places of one verb in a function, the later ones are numbered.
    """
    found: dict[str, re.Pattern[str]] = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        for function, text in _texts(ast.parse(file.read_text()), ""):
            # the whole text: a name, such as that of what a ledger was taken for
            commands = [each for each in COMMAND.finditer(text) if each[0] != text or " " in each[0].strip()[10:]]
            pattern = re.compile(".*?".join(map(re.escape, _FILLED.split(text))), re.DOTALL)
            for verb in [*(each[2] or each[1] for each in commands), *OTHERS.findall(text)]:
                place = f"{file.relative_to(LIBRARY)} {function}: {verb}"
                count = sum(each == place or each.startswith(f"{place} ") for each in found)
                found[f"{place} {count + 1}" if count else place] = pattern
    return found


class States(dict["Callable[..., EpochsinkError]", tuple[str, ...]]):
    """The states of one file of tests: functions that make one and return the error that it raises."""

    def shows(self, *places: str) -> Callable[[_State], _State]:
        """Say which `places` the commands in a state's error come from, in their order."""

        def note(state: _State) -> _State:
            self[state] = places
            return state

        return note


def commands_in(error: EpochsinkError, shown: Sequence[str]) -> list[list[str]]:
    """Return the words of each command in an error's text, which must come from these places, in their order."""
    text, known = f"{error.message}\n{error.hint}", places()
    assert [each for each in shown if not known[each].search(text)] == [], text
    found = list(COMMAND.finditer(text))
    assert [each[2] or each[1] for each in found] == [each.rpartition(": ")[2].split()[0] for each in shown], text
    return [shlex.split(each[0]) for each in found]


def type_words(words: Sequence[str]) -> Result:
    """Type a command, agree to what it asks, and assert that it ends well."""
    asks = "--end" in words or not ASKS.isdisjoint(words[1:3])
    answer = CliRunner().invoke(app, [*words[1:], *(["--yes"] if asks else [])])
    # what looks says by 3 that a person should look
    assert answer.exit_code in {0, *([] if LOOKS.isdisjoint(words[1:2]) else [3])}, (words, answer.output)
    return answer


def type_look(error: EpochsinkError, addresses: Addresses) -> None:
    """Type what the line `Type: ` of an error says, if that only looks; else it is a command of the hint."""
    error.notes = (error.note_to_type,)
    error.address(addresses)
    words = shlex.split(error.notes[0].removeprefix("Type: "))
    if words[1] in LOOKS:
        type_words(words)


def declared() -> set[str]:
    """Return the places that tests name to `States.shows` and `commands_in`."""
    return {
        place.value
        for file in Path(__file__).parents[1].glob("*/test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"shows", "commands_in"}
        for place in ast.walk(node)
        if isinstance(place, ast.Constant) and isinstance(place.value, str)
    }


def _texts(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Yield the texts below a node, each with the function or constant that it stands in; no docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        yield function, "".join(str(part.value) if isinstance(part, ast.Constant) else "\x00" for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield function, node.value
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = node.name
    elif isinstance(node, ast.AnnAssign | ast.Assign) and not function:
        function = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, function)
