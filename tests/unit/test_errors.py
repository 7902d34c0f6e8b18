"""Errors cross from executors to the driver: by pickle, and as a line of text."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import epochsink.elasticsearch.errors
import epochsink.kafka.errors
import epochsink.postgres.errors
from epochsink import Elasticsearch, Kafka, Postgres, errors
from epochsink.errors import Addresses, CheckFailed, ConfigurationError, EpochsinkError, RowsRejected, without_values
from epochsink.spark.argument_checks import refuse_unfit

if TYPE_CHECKING:
    from epochsink.sink import Sink

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EpochsinkError)]
AWKWARD = 'value "x"; drop table y;-- \n  breaks\tthe rule: ü \u2028 [1] \\n {"a": 1}'


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[EpochsinkError]) -> None:
    error = kind(AWKWARD, hint="do this", column="id", epoch=7)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    assert type(again) is kind
    assert (again.message, again.hint, again.facts) == (AWKWARD, "do this", {"column": "id", "epoch": 7})
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_found_again_in_a_text_that_quotes_it(kind: type[EpochsinkError]) -> None:
    """Class, message, hint and facts; facts as text, or lists of it."""
    line = kind(AWKWARD, hint=AWKWARD, column=AWKWARD, epoch=7, findings=[AWKWARD, 8]).to_line()
    assert "\n" not in line
    text = f'Traceback:\n  File "x.py", line 1\nmodule.TaskFailed: {line}\n\n\tat java.lang.Thread.run()'
    found = EpochsinkError.from_text(text)
    assert type(found) is kind
    facts = {"column": AWKWARD, "epoch": "7", "findings": [AWKWARD, "8"]}
    assert (found.message, found.hint, found.facts) == (AWKWARD, AWKWARD, facts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no error",
        "epochsink-error: [",
        "epochsink-error: []",
        'epochsink-error: ["Unheard", "m", "", {}]',
        "[1, 2]",
    ],
)
def test_other_texts_hold_no_error(text: str) -> None:
    assert EpochsinkError.from_text(text) is None


def test_the_first_error_of_a_text_that_can_be_read_is_taken() -> None:
    lines = ["epochsink-error: [broken]", RowsRejected("a").to_line(), ConfigurationError("b").to_line()]
    found = EpochsinkError.from_text("\n".join(lines))
    assert isinstance(found, RowsRejected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_made_again_of_its_words(kind: type[EpochsinkError]) -> None:
    """As a client of Spark Connect reads them in the ledger."""
    found = EpochsinkError.from_words(without_values(kind(AWKWARD, values="secret")))
    assert (type(found), found.message, found.values) == (kind, AWKWARD, "")


@pytest.mark.parametrize("words", ["", "KeyError", "KeyError: 7"])
def test_words_of_another_error_stay_as_they_are(words: str) -> None:
    found = EpochsinkError.from_words(words)
    assert (type(found), found.message) == (EpochsinkError, words)


def test_the_reference_page_names_every_error() -> None:
    """Its cause, what is known about the rows and what to do, each in a cell; no error of a sink is missing."""
    modules = [errors, epochsink.kafka.errors, epochsink.postgres.errors, epochsink.elasticsearch.errors]
    raised = {
        kind.__name__ if kind.__module__ == errors.__name__ else f"{kind.__module__}.{kind.__name__}"
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, EpochsinkError)
    }
    page = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text()
    assert set(re.findall(r"^\| `([\w.]+)` \| .+ \| .+ \| .+ \|$", page, re.MULTILINE)) == raised


def test_the_way_out_ends_the_text() -> None:
    assert str(EpochsinkError("wrong", hint="do this")) == "wrong\n  Hint: do this"
    assert str(EpochsinkError("wrong")) == "wrong"


def test_a_failed_check_lists_every_finding() -> None:
    error = CheckFailed.of(["first", "second"])
    assert str(error) == "2 check(s) failed before any row moved:\n  - first\n  - second"
    assert error.facts["findings"] == ["first", "second"]
    assert isinstance(error, ValueError)


def test_the_commands_of_a_hint_can_be_typed_as_they_stand() -> None:
    error = EpochsinkError(
        "gone",
        hint="say so: epochsink accept CHECKPOINT 4 --sink table; see CHECKPOINT, and epochsink letters list "
        "CHECKPOINT",
        command="epochsink repair CHECKPOINT --sinks MODULE:ATTRIBUTE",
    )
    error.address(Addresses())
    error.address(Addresses("/lake/my orders", "my_pipeline:sink", "/my spool"))
    error.address(Addresses("/elsewhere", "other:sink"))
    assert error.hint == (
        "say so: epochsink accept '/lake/my orders' --spool '/my spool' 4 --sink table; see CHECKPOINT, and epochsink "
        "letters list '/lake/my orders'"
    )
    repair = "epochsink repair '/lake/my orders' --spool '/my spool' --sinks my_pipeline:sink"
    assert (error.command, error.note_to_type) == (repair, f"Type: {repair}")
    assert pickle.loads(pickle.dumps(error)).command == repair  # noqa: S301 - its own bytes
    assert EpochsinkError("gone").note_to_type == "Type: epochsink status CHECKPOINT"


@pytest.mark.parametrize(
    "sink",
    [
        Postgres("postgresql://nobody@127.0.0.1:1/nowhere", table="t", timeout=1),
        Elasticsearch("http://127.0.0.1:1", index="i"),
        Kafka(bootstrap_servers="127.0.0.1:1", topic="t", timeout=1),
    ],
    ids=["PostgreSQL", "Elasticsearch", "Kafka"],
)
def test_a_check_of_a_server_that_is_not_there_speaks_of_no_epoch(sink: Sink) -> None:
    """None has begun: the hint of a failed connection said that Spark runs the epoch again."""
    with pytest.raises(CheckFailed) as refused:
        refuse_unfit({"out": sink}, {"out": pa.schema([("id", pa.int64())])})
    assert "reach" in str(refused.value)
    assert "epoch" not in str(refused.value).replace("epochsink", "")
