"""The name by which the command line finds the sinks of a pipeline."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from epochsink import ExactlyOnce
from epochsink.cli.sinks_option import load_sinks
from epochsink.spark.module_reference import reference_to
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE = "named_pipeline"
PIPELINE = """
from epochsink.testing import LocalSink
from epochsink import ExactlyOnce
from epochsink.spark.module_reference import reference_to

def made():
    return ExactlyOnce(checkpoint="FOLDER/checkpoint", sinks={"table": LocalSink("FOLDER/table")})

sink = made()
SINKS = {"table": LocalSink("FOLDER/other")}
if __name__ == "__main__":
    print(reference_to(sink, sink.sinks))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / f"{MODULE}.py").write_text(PIPELINE.replace("FOLDER", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(MODULE)
    sys.modules.pop(MODULE, None)


def test_an_object_of_a_module_is_named_as_the_command_line_loads_it(module: Any) -> None:
    reference = reference_to(module.sink, module.sink.sinks)
    assert reference == f"{MODULE}:sink"
    assert load_sinks(reference).sinks == module.sink.sinks


def test_a_copy_in_another_process_knows_the_name(module: Any) -> None:
    """As in the server of Spark Connect, where no module has it."""
    copy = pickle.loads(pickle.dumps(module.sink))  # noqa: S301 - its own bytes
    assert (copy.reference, copy.sinks) == (f"{MODULE}:sink", module.sink.sinks)


def test_a_mapping_with_the_sinks_is_named_if_the_object_has_no_name(module: Any, tmp_path: Path) -> None:
    once = ExactlyOnce(checkpoint=str(tmp_path / "checkpoint"), sinks=module.SINKS)
    assert reference_to(once, once.sinks) == f"{MODULE}:SINKS"


def test_what_a_function_has_made_has_no_name(module: Any) -> None:
    """Another mapping with sinks that are only equal is not it."""
    once = module.made()
    assert reference_to(once, once.sinks) == ""
    assert reference_to(once, {"table": LocalSink(once.sinks["table"].folder)}) == ""


@pytest.mark.parametrize("arguments", [[f"{MODULE}.py"], ["-m", MODULE]], ids=["as a file", "as a module"])
@pytest.mark.usefixtures("module")
def test_a_program_is_named_as_another_process_imports_it(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{MODULE}:sink", done.stderr
