"""Code in the documentation is run, is part of a file that a test runs, or says why it is not run."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import typer

import epochsink
from epochsink.cli.app import app
from proof.run import ROUNDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = [
    *(ROOT / "examples").glob("*.py"),
    ROOT / "tests" / "contract" / "test_json_lines.py",
]
"""Files that tests run, and of which pages show parts."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return each block of Python, with the comment before it."""
    return re.findall(r"(?:<!-- (.*?) -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL)


def code(page: Path) -> list[str]:
    """Return the lines of a page that are to be typed, without comments and prompts."""
    text = page.read_text()
    fenced = "".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = re.findall(r"^    +(.*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [line.partition("   #")[0].strip() for line in [*fenced.splitlines(), *indented]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_block_of_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructors and signatures are real; the stream is a stand-in, and `start` starts nothing."""
    monkeypatch.setenv("DSN", "postgresql://app@127.0.0.1/shop")
    monkeypatch.setattr(epochsink.ExactlyOnce, "start", create_autospec(epochsink.ExactlyOnce.start))
    run_elsewhere = "".join(file.read_text() for file in RUN_ELSEWHERE)
    names = {name: getattr(epochsink, name) for name in epochsink.__all__} | {"__name__": "pipeline"}
    names |= {"orders": MagicMock(), "F": MagicMock(), "DSN": "postgresql://app@127.0.0.1/shop"}
    for comment, block in blocks(page):
        if block in run_elsewhere or re.fullmatch(r"not run: .{10,}", comment):
            continue
        exec(compile(block, page.name, "exec"), names)  # noqa: S102 - our own pages


def test_the_page_of_a_sink_of_ones_own_shows_the_example_as_it_is() -> None:
    code = "".join(file.read_text() for file in RUN_ELSEWHERE)
    shown = [block for _, block in blocks(ROOT / "docs" / "how-to" / "write-a-sink.md")]
    assert shown
    assert [block for block in shown if block.strip() not in code] == []


def test_a_file_that_a_page_shows_is_named_as_the_site_reads_it() -> None:
    """Anything else stands on the site as it is, without an error; a formatter of Python changes such lines."""
    shown = [line for page in PAGES for line in page.read_text().splitlines() if line.lstrip().startswith("--8")]
    files = [re.fullmatch(r'--8<-- "(.+)"', line) for line in shown]
    assert files
    assert all(file and (ROOT / file[1]).is_file() for file in files), shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_other_block_is_of_a_kind_that_a_test_reads(page: Path) -> None:
    """Commands: below. SQL: the DBA's page, by test_postgres_check. Text: what a program says, and a server's role."""
    for language, block in re.findall(r"^```([a-z]+).*?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language == "json":
            assert json.loads(block)
        else:
            assert language in {"python", "sh", "console", "text"} | ({"sql"} if page.stem == "for-dbas" else set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_line_to_be_typed_is_a_block_of_its_own(page: Path) -> None:
    """Below an item of a list it needs eight spaces: with less, the site makes a paragraph of it."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    in_list = False
    for line in text.splitlines():
        in_list = bool(re.match(r"(-|\d+\.) ", line)) or (in_list and (not line or line.startswith("  ")))
        if line.lstrip().startswith(("epochsink ", "make ", "pip ")) and line.startswith("   "):
            assert line.startswith(" " * 8) is in_list, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_extra_exists(page: Path) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"epochsink\[([a-z,]+)\]", page.read_text()):
        assert set(named.split(",")) <= set(known), named


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md", "tests/README.md"])
def test_the_links_of_pages_outside_of_the_site_lead_somewhere(page: str) -> None:
    """Those of the site are checked when it is built."""
    file = ROOT / page
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text()):
        assert (file.parent / link).exists(), link


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_what_make_can_be_told_to_run_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    benchmarks, proofs = re.findall(r"^(?:PROOFS|BENCHMARKS) := (.*)$", makefile, re.MULTILINE)
    assert proofs.split() == list(ROUNDS)
    scripts = dict(re.findall(r"^BENCH_([a-z-]+) :?= (\w+\.py)", makefile, re.MULTILINE))
    assert benchmarks.split() == list(scripts)
    assert all((ROOT / "tests" / "instruments" / "benchmarks" / script).is_file() for script in scripts.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_exists_with_these_options(page: Path) -> None:
    command = typer.main.get_command(app)
    for line in code(page):
        if made := re.match(r"make ([a-z0-9-]+)", line):
            assert made[1] in targets(), line
        words = [word.strip("'\"") for word in line.removeprefix("$ ").split("|")[0].split()]
        if words[:1] == ["epochsink"]:
            assert_parses(command, words[1:])


def assert_parses(command: Any, words: list[str]) -> None:
    """Find the options in the command's own parser. Typer brings its own click, so nothing here has a public type."""
    context = command.context_class(command)
    if hasattr(command, "get_command") and words and not words[0].startswith("-"):
        below = command.get_command(context, words[0])
        assert below is not None, f"no command {words[0]}"
        assert_parses(below, words[1:])
    else:
        command.make_parser(context).parse_args(list(words))  # raises for an option that does not exist


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        assert_parses(typer.main.get_command(app), ["status", "/lake/checkpoint", "--epoch", "3"])


OPERATE = ROOT / "docs" / "how-to" / "operate.md"


def test_each_error_has_a_section_for_operators() -> None:
    classes = [each for each in vars(epochsink.errors).values() if isinstance(each, type)]
    errors = {each.__name__ for each in classes if issubclass(each, epochsink.EpochsinkError)} - {"EpochsinkError"}
    text = OPERATE.read_text()
    assert errors == set(re.findall(r"^### `(\w+)`$", text, re.MULTILINE))
    assert [name for name in errors if f"(#{name.lower()})" not in text] == []


def messages_of(kind: str) -> list[str]:
    """Return the message of each error of a kind in the library, with … for what is filled in."""
    trees = [ast.parse(file.read_text()) for file in Path(epochsink.__file__).parent.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    made = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == kind]
    parts = [each.values if isinstance(each, ast.JoinedStr) else [each] for each in made]
    return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in each) for each in parts]


def test_the_table_of_what_went_back_has_the_first_words_of_each_message() -> None:
    section = OPERATE.read_text().partition("### `WentBack`")[2].partition("\n#### ")[0]
    cells = re.findall(r'^\| ("[^|]+") \|', section, re.MULTILINE)
    words = [re.escape(each).replace("…", ".*") for cell in cells for each in re.findall(r'"(.+?)"', cell)]
    messages = messages_of("WentBack")
    assert len(messages) > 30
    assert [message for message in messages if not any(re.match(each, message) for each in words)] == []
    assert [each for each in words if not any(re.match(each, message) for message in messages)] == []


@pytest.mark.parametrize("module", ["epochsink", "epochsink.sink", "epochsink.testing", "epochsink_devkit.history"])
def test_the_reference_has_every_public_name(module: str) -> None:
    pages = "".join((ROOT / "docs" / "reference" / page).read_text() for page in ("configuration.md", "api.md"))
    named = set(re.findall(rf"^::: {module}\.(\w+)$", pages, re.MULTILINE))
    elsewhere = {"__version__"} | (
        {"Sink"} if module == "epochsink" else set()
    )  # Sink: among the names of epochsink.sink
    assert named == set(import_module(module).__all__) - elsewhere
