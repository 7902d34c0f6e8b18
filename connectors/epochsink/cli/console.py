"""Print the answer of a verb: what it will do, one question, what it has done, and errors without a traceback.

With ``--json`` it asks no question, and its whole answer is one JSON object on standard output.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from epochsink.errors import ConfigurationError, EpochsinkError

ATTENTION: Final = 3
"""The status of a verb that finds something for which a person is needed."""
_USAGE: Final = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and ask nothing.")]

_CLIENTS: Final = {
    "psycopg": "PostgreSQL",
    "cimpl": "Kafka",
    "kafka": "Kafka",
    "elastic_transport": "Elasticsearch",
    "elasticsearch": "Elasticsearch",
    "opensearchpy": "OpenSearch",
    "obstore": "the object store",
    "py4j": "Spark",
    "pyspark": "Spark",
}
"""Which system the client speaks to that an exception comes from: by the package's name, as few are installed."""


class VerbOutput:
    """What a verb says: lines as they come or, with ``--json``, the entries of ``values`` at its end."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.values: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Print a line for a person."""
        if not self.as_json:
            typer.echo(text)

    def confirm(self, plan: Sequence[str], *, yes: bool) -> None:
        """Print what will be done and, unless ``yes``, ask; a no, or no answer, ends with status 1.

        With ``--json`` no question can be answered: raises `ConfigurationError` unless ``yes``.
        """
        self.values["plan"] = list(plan)
        if self.as_json and not yes:
            raise ConfigurationError(
                "nothing was changed: with --json no question is asked", hint="read what 'plan' says, and add --yes"
            )
        self.say("\n".join(("This will", *(f"  - {line}" for line in plan))))
        try:
            agreed = yes or typer.confirm("Go on?")
        except typer.Abort:
            agreed = False
        if not agreed:
            typer.echo("nothing was changed")
            raise typer.Exit(1)

    @contextmanager
    def log(self) -> Iterator[None]:
        """Print what the package logs, or put it into ``done``: it says what was done to ledger and targets."""
        log, level = logging.getLogger("epochsink"), logging.getLogger("epochsink").level
        handler = _Lines(self.values.setdefault("done", [])) if self.as_json else logging.StreamHandler(sys.stdout)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)


class _Lines(logging.Handler):
    """Appends each record's message to a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def answering(*, as_json: bool = False) -> Iterator[VerbOutput]:
    """Yield a verb's answer; print it in the end if it is JSON.

    An error of this package, a client or the operating system is printed as text, or as the entry ``error``, and ends
    with status 1. A defect keeps its traceback, on standard error.
    """
    answer = VerbOutput(as_json=as_json)
    try:
        if as_json:
            # what an imported module prints must not break the JSON object
            with redirect_stdout(sys.stderr):
                yield answer
        else:
            yield answer
    except typer.Exit:
        raise
    except Exception as failure:
        explanation = explanation_of(failure)
        answer.values["error"] = {"type": type(failure).__name__, **(explanation or {"message": str(failure)})}
        if explanation is None:
            raise
        if not as_json:
            # plain text: brackets in a message are not markup, and lines are not wrapped
            text = str(failure) if isinstance(failure, EpochsinkError) else "\n  Hint: ".join(explanation.values())
            console = Console(stderr=True)
            console.print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from failure
    finally:
        if as_json:
            typer.echo(json.dumps(answer.values, indent=2))


class Verbs(TyperGroup):
    """The verbs; with ``--json``, an error in what was typed is a JSON object too."""

    def main(  # type: ignore[override] # the library calls it by keyword
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run the verb that ``args``, by default the process's own, name; end with its status."""
        typed = sys.argv[1:] if args is None else args
        if "--json" not in typed or not standalone_mode:
            return super().main(args, standalone_mode=standalone_mode, **extra)
        try:
            status = super().main(args, standalone_mode=False, **extra)
        except Exception as failure:
            # so the library names its own errors in every version, wherever it keeps their class
            message = getattr(failure, "format_message", None)
            if message is None:
                raise
            error = {"type": type(failure).__name__, "message": message(), "hint": "see epochsink --help"}
            typer.echo(json.dumps({"error": error}, indent=2))
            status = _USAGE
        sys.exit(status or 0)


def explanation_of(failure: Exception) -> dict[str, str] | None:
    """Return what to tell of a failure, the hint last; None for a defect, whose traceback is needed."""
    if isinstance(failure, EpochsinkError):
        message = "\n".join((failure.message, *failure.notes))
        return {"message": message, **({"values": failure.values} if failure.values else {}), "hint": failure.hint}
    client = _CLIENTS.get(type(failure).__module__.partition(".")[0])
    if client is None and not isinstance(failure, OSError):
        return None
    check = "check that the file or the server exists, and that this user may use it"
    if client is not None:
        check = f"check that {client} runs, that this machine reaches it, and that address and credentials are right"
    doing = "".join(f"{note}: " for note in getattr(failure, "__notes__", ()))
    reason = " ".join(str(failure).split())
    said = f"{doing}{client or 'the operating system'} says {type(failure).__name__}: {reason}"
    return {"message": said, "hint": check}
