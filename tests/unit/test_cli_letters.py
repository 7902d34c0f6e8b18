"""`epochsink letters` on a checkpoint made by hand, with letters in memory."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderSink
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.sink import Chosen, LastDone, Letter, Letters, Operator, Retried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typer.testing import Result

MODULE = "letters_sinks"


class ListedLetters(Letters):
    """Letters in a list, oldest first; a row that is odd is refused again."""

    def __init__(self, *rows: int, epoch: int = 0) -> None:
        self.kept = [Letter(str(row), epoch, "23514", "odd", {"id": row}, "2026-03-29T01:30:00+00:00") for row in rows]

    def read(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        return [letter for letter in reversed(self.kept) if self._is_chosen(letter, chosen)][:limit]

    def count(self, chosen: Chosen) -> int:
        return len(self.read(chosen, len(self.kept) + 1))

    def caution(self) -> str:
        return "newer rows are replaced"

    def retry(self, chosen: Chosen) -> Retried:
        tried = self.read(chosen, len(self.kept) + 1)
        again = [letter for letter in tried if letter.row["id"] % 2]
        self.kept = [letter for letter in self.kept if letter not in tried or letter in again]
        return Retried(len(tried) - len(again), 0, len(again), "odd" if again else "")

    def drop(self, chosen: Chosen) -> int:
        gone = self.read(chosen, len(self.kept) + 1)
        self.kept = [letter for letter in self.kept if letter not in gone]
        return len(gone)

    @staticmethod
    def _is_chosen(letter: Letter, chosen: Chosen) -> bool:
        return letter.id in (chosen.ids or {letter.id}) and letter.epoch == (chosen.epoch or letter.epoch)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, ListedLetters]:
    """Return the letters of each sink; a sink that is not in it can have none."""
    letters: dict[str, ListedLetters] = {}

    def letters_of(_: Operator, sink: str) -> ListedLetters | None:
        return letters.get(sink)

    monkeypatch.setattr(Operator, "letters", letters_of)
    return letters


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run ``epochsink letters`` on a checkpoint of two sinks, where no JVM can start."""
    (tmp_path / f"{MODULE}.py").write_text(
        "from folder_sink import FolderSink\n"
        f"SINKS = {{name: FolderSink(f'{tmp_path}/{{name}}') for name in ('table', 'search')}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    monkeypatch.setenv("COLUMNS", "200")
    CheckpointKit(
        tmp_path / "checkpoint", {name: FolderSink(str(tmp_path / name)) for name in ("table", "search")}
    ).run(0, {"table": pa.record_batch({"id": [1]})})

    def invoke(verb: str, *options: str, answer: str = "") -> Result:
        given = ["letters", verb, str(tmp_path / "checkpoint"), "--sinks", f"{MODULE}:SINKS", *options]
        return CliRunner().invoke(app, given, input=answer)

    yield invoke
    sys.modules.pop(MODULE, None)


def test_letters_are_listed_newest_first(kept: dict[str, ListedLetters], run: Callable[..., Result]) -> None:
    kept["table"] = ListedLetters(1, 2, 3)
    result = run("list", "--limit", "2")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "sink 'table': 3 dead letter(s), the newest 2:",
        "  3  epoch 0, 2026-03-29T01:30:00+00:00: 23514 odd",
        '    {"id": 3}',
        "  2  epoch 0, 2026-03-29T01:30:00+00:00: 23514 odd",
        '    {"id": 2}',
    ]
    found = json.loads(run("list", "--id", "2", "--id", "1", "--json").output)
    assert [(each["sink"], each["count"]) for each in found["sinks"]] == [("table", 2)]
    assert found["sinks"][0]["letters"][0] == {
        "id": "2",
        "epoch": 0,
        "code": "23514",
        "error": "odd",
        "row": {"id": 2},
        "set_aside_at": "2026-03-29T01:30:00+00:00",
        "pending": False,
    }


def test_letters_are_told_what_the_ledger_calls_done_and_what_an_operator_has_accepted(
    kept: dict[str, ListedLetters], run: Callable[..., Result], tmp_path: Path
) -> None:
    kept["table"] = ListedLetters(1)
    run("list")
    done = kept["table"].applied
    assert done is not None
    assert (done.epoch, bool(done.parts)) == (0, True)
    told = CliRunner().invoke(app, ["accept", str(tmp_path / "checkpoint"), "0", "--sink", "table", "--yes"])
    assert told.exit_code == 0, told.output
    run("list")
    assert kept["table"].applied == LastDone(0, "", ())


def test_a_number_is_listed_as_the_sink_tells_it(kept: dict[str, ListedLetters], run: Callable[..., Result]) -> None:
    row = {"whole": 12345678901234567890123, "decimal": "12345678901234567.0123456789"}
    kept["table"] = ListedLetters()
    kept["table"].kept = [Letter("1", 0, "", "odd", row, "")]
    assert json.loads(run("list", "--json").output)["sinks"][0]["letters"][0]["row"] == row
    assert '{"whole": 12345678901234567890123, "decimal": "12345678901234567.0123456789"}' in run("list").output


def test_a_long_row_is_cut_for_a_person_only(kept: dict[str, ListedLetters], run: Callable[..., Result]) -> None:
    kept["table"] = ListedLetters()
    kept["table"].kept = [Letter("1", 0, "", "long", {"text": "x" * 1000}, "")]
    assert "... (--json shows all of it)" in run("list").output
    assert "x" * 1000 in run("list", "--json").output


def test_a_retry_asks_says_what_it_did_and_ends_with_3_if_a_row_is_refused_again(
    kept: dict[str, ListedLetters], run: Callable[..., Result]
) -> None:
    kept["table"] = ListedLetters(1, 2, 4)
    refused = run("retry", "--all", answer="n\n")
    assert refused.exit_code == 1
    assert "nothing was changed" in refused.output
    assert "write 3 dead letter(s) of sink 'table' to its target" in refused.output
    assert "newer rows are replaced" in refused.output
    assert len(kept["table"].kept) == 3
    result = run("retry", "--all", answer="y\n")
    assert result.exit_code == 3
    assert "sink 'table': 2 written, 1 still dead letter(s)" in result.output
    assert "for example: odd" in result.output
    kept["table"] = ListedLetters(2, 4)
    result = run("retry", "--id", "4", "--yes", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert (answer["written"], answer["superseded"], answer["kept"]) == (1, 0, 0)
    assert answer["sinks"] == [{"sink": "table", "written": 1, "superseded": 0, "kept": 0, "reason": ""}]
    assert [letter.id for letter in kept["table"].kept] == ["2"]


def test_drop_deletes_what_is_chosen(kept: dict[str, ListedLetters], run: Callable[..., Result]) -> None:
    kept["table"] = ListedLetters(1, 2, epoch=3)
    assert run("drop", "--epoch", "3", answer="n\n").exit_code == 1
    assert json.loads(run("drop", "--epoch", "3", "--json").output)["error"]["type"] == "ConfigurationError"
    assert len(kept["table"].kept) == 2
    result = run("drop", "--id", "1", "--yes")
    assert (result.exit_code, [letter.id for letter in kept["table"].kept]) == (0, ["2"])
    assert "dropped 1 dead letter(s)" in result.output
    assert json.loads(run("drop", "--all", "--yes", "--json").output)["dropped"] == 1


@pytest.mark.parametrize("verb", ["retry", "drop"])
@pytest.mark.parametrize("options", [(), ("--all", "--id", "1")])
def test_which_letters_has_to_be_said(
    verb: str, options: tuple[str, ...], kept: dict[str, ListedLetters], run: Callable[..., Result]
) -> None:
    kept["table"] = ListedLetters(1)
    result = run(verb, *options, "--yes")
    assert result.exit_code == 2
    assert "--id or --epoch, or --all" in result.output
    assert "--id or --epoch" in json.loads(run(verb, *options, "--yes", "--json").output)["error"]["message"]
    assert len(kept["table"].kept) == 1


def test_all_letters_are_those_of_each_sink_that_has_any(
    kept: dict[str, ListedLetters], run: Callable[..., Result]
) -> None:
    """As the pages show the line; an id is one of a single sink."""
    kept["table"], kept["search"] = ListedLetters(2), ListedLetters()
    # the other one can have letters, and has none
    assert run("retry", "--all", "--yes").output.splitlines()[-1] == "sink 'table': 1 written, 0 still dead letter(s)"
    kept["table"], kept["search"] = ListedLetters(2, 6), ListedLetters(4, 5)
    asked = run("retry", "--all", answer="n\n").output
    assert [f"write 2 dead letter(s) of sink '{name}' to its target" in asked for name in kept] == [True, True]
    result = run("retry", "--all", "--yes", "--json")
    assert result.exit_code == 3
    assert [(each["sink"], each["written"], each["kept"]) for each in json.loads(result.output)["sinks"]] == [
        ("table", 2, 0),
        ("search", 1, 1),
    ]
    kept["table"], kept["search"] = ListedLetters(2), ListedLetters(2, 4)
    for verb in ("retry", "drop"):
        ids = run(verb, "--id", "2", "--yes")
        assert (ids.exit_code, "several sinks have letters of these ids: table, search" in ids.output) == (1, True)
    # to delete rows for good, one sink is named
    several = run("drop", "--all", "--yes")
    assert (several.exit_code, "several sinks have such dead letters: table, search" in several.output) == (1, True)
    assert "sink 'search': 2 written" in run("retry", "--all", "--yes", "--sink", "search").output
    assert "sink 'table': 1 dead letter(s)" in run("list").output
    assert "sink 'search': 0 dead letter(s)" in run("list").output


def test_sinks_without_letters_say_so(kept: dict[str, ListedLetters], run: Callable[..., Result]) -> None:
    result = run("list")
    assert (result.exit_code, "the sinks have no dead letters" in result.output) == (1, True)
    kept["table"] = ListedLetters(1)
    assert "sink 'search' has no dead letters" in run("list", "--sink", "search").output
    assert "the query has no sink 'other'" in run("list", "--sink", "other").output
