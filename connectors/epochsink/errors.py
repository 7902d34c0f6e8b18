"""Everything that epochsink raises.

    EpochsinkError
    ├── ConfigurationError          bad input, known before any row moved
    │   └── CheckFailed             the live systems do not fit: every finding in one message
    ├── UnsupportedQuery            this query cannot be exactly-once (async progress tracking, ...)
    ├── PrepareFailed               an epoch could not be prepared; nothing of it became visible
    │   └── RowsRejected            the target refuses rows of the epoch for good
    ├── Fenced                      another driver has taken over this checkpoint
    ├── WentBack                    checkpoint, ledger and target contradict each other
    ├── OutcomeUnknown              whether an epoch was committed cannot be established
    ├── LedgerCorrupt               a ledger entry cannot be read
    ├── SpoolMissing                the durable copy of an epoch's rows is gone
    │   ├── SpoolDamaged            it is there, and is not what was written
    │   └── LogIncomplete           the topic that keeps the rows does not hold them all any more
    └── ServiceError                a development service did not start or stop

Each carries its facts as attributes, survives pickling (errors cross from executors to the driver),
and says what to do next. Values of rows are kept apart from the message: `EpochsinkError.hide_values` leaves them out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

_Kind = TypeVar("_Kind", bound="EpochsinkError")

LOOK_FIRST: Final = "epochsink status CHECKPOINT"
"""What to type if no single command mends what an error says."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """What completes the commands of an error: where the checkpoint is, and how the command line finds the sinks.

    ``sinks`` is MODULE:ATTRIBUTE of the object that the pipeline starts, ``spool`` the place of a spool that is not in
    the checkpoint. "" for what is not known, or not needed.
    """

    checkpoint: str = ""
    sinks: str = ""
    spool: str = ""

    def complete(self, text: str) -> str:
        """Return a text in which the commands can be typed as they stand.

        A command ends with the text, or before a semicolon, a comma or a bracket: a full stop would be copied with it.
        """
        if self.sinks:
            text = text.replace("--sinks MODULE:ATTRIBUTE", f"--sinks {shlex.quote(self.sinks)}")
        if self.checkpoint:
            text = re.sub(r"(epochsink (?:letters )?(\w+)) CHECKPOINT\b", self._addressed, text)
        return text

    def _addressed(self, command: re.Match[str]) -> str:
        start, verb = command.groups()
        # a letter is never in the spool
        spool = f" --spool {shlex.quote(self.spool)}" if self.spool and verb not in {"list", "retry", "drop"} else ""
        return f"{start} {shlex.quote(self.checkpoint)}{spool}"


class EpochsinkError(Exception):
    """Base of all errors of this package.

    ``message`` says what is wrong and with which option or setting; ``hint``, if there is one, what to do
    about it; ``values`` is text that holds values of rows; ``notes`` are lines about the epoch that failed.
    ``command`` is the one that mends it, if there is one that does whatever else is the case. Further keyword arguments
    become entries of ``facts``.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        values: str = "",
        notes: Sequence[str] = (),
        command: str = "",
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.values = values
        self.notes = tuple(notes)
        self.command = command
        self.facts = facts

    def __str__(self) -> str:
        # the notes last: Spark appends to the last line, which must not be a command that people copy
        lines = [("Hint", self.hint), ("Values", self.values)]
        return "\n  ".join([self.message, *(f"{name}: {text}" for name, text in lines if text), *self.notes])

    def name_sink(self, sink: str) -> None:
        """Put the sink's name before the message and into the commands of the hint, once."""
        if not self.message.startswith("sink '"):
            self.message = f"sink '{sink}': {self.message}"
        self.hint = self.hint.replace("--sink NAME", sink_option(sink))

    def hide_values(self) -> None:
        """Leave the values of rows out of the text from now on."""
        if self.values:
            self.values = HIDDEN

    def fresh(self) -> Self:
        """Return a copy without traceback and cause, to be raised where the first one's frames mean nothing."""
        return _rebuild(type(self), self._fields())

    def _fields(self) -> dict[str, Any]:
        texts = {"message": self.message, "hint": self.hint, "values": self.values, "notes": self.notes}
        return {**texts, "command": self.command, "facts": self.facts}

    def address(self, addresses: Addresses) -> None:
        """Complete the commands, so that they can be typed as they stand."""
        self.message = addresses.complete(self.message)  # a finding names its way out itself
        self.hint = addresses.complete(self.hint)
        self.command = addresses.complete(self.command)
        self.notes = tuple(map(addresses.complete, self.notes))

    @property
    def note_to_type(self) -> str:
        """The line that says what to type first."""
        return f"Type: {self.command or LOOK_FIRST}"

    def to_line(self) -> str:
        """Return the error as one line of text that `from_text` finds again: for crossing into a JVM's message."""
        facts = {
            name: [*map(str, value)] if isinstance(value, list) else str(value) for name, value in self.facts.items()
        }
        return f"{_LINE}{json.dumps([type(self).__name__, {**self._fields(), 'facts': facts}])}"

    @staticmethod
    def from_text(text: str) -> EpochsinkError | None:
        """Return the error that a text quotes (see `to_line`), or None."""
        for line in re.findall(re.escape(_LINE) + r"(\[.*\])", text):
            try:
                name, fields = json.loads(line)
            except ValueError:
                # text of another origin that looks like ours
                continue
            kind = _kind_named(name)
            if kind is not None:
                return _rebuild(kind, fields)
        return None

    @staticmethod
    def from_words(text: str) -> EpochsinkError:
        """Return the error whose kind and message a text holds (see `without_values`)."""
        name, _, message = text.partition(": ")
        kind = _kind_named(name)
        return EpochsinkError(text) if kind is None else kind(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._fields())


def epochs(first: int, last: int) -> str:
    """Return a range of epochs as text."""
    return f"epoch {first}" if first == last else f"epochs {first} to {last}"


def sink_option(sink: str) -> str:
    """Return the option that names a sink in a command."""
    return f"--sink {shlex.quote(sink)}"


HIDDEN: Final = "not shown; ExactlyOnce(show_values=True) shows them"
"""What replaces values of rows."""

_LINE = "epochsink-error: "


def without_values(failure: BaseException) -> str:
    """Return a failure in words that hold no values of rows: of an error that is not ours, only its type."""
    kind = type(failure).__name__
    return f"{kind}: {failure.message}" if isinstance(failure, EpochsinkError) else kind


@contextmanager
def naming(sink: str) -> Iterator[None]:
    """Name the sink in an error, also in one of a client."""
    try:
        yield
    except EpochsinkError as failure:
        failure.name_sink(sink)
        raise
    except Exception as failure:
        failure.add_note(f"sink '{sink}'")
        raise


def _all_kinds(kind: type[EpochsinkError]) -> list[type[EpochsinkError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


def _kind_named(name: str) -> type[EpochsinkError] | None:
    return next((kind for kind in _all_kinds(EpochsinkError) if kind.__name__ == name), None)


def _rebuild(kind: type[_Kind], fields: dict[str, Any]) -> _Kind:
    texts = {name: text for name, text in fields.items() if name != "facts"}
    return kind(texts.pop("message"), **texts, **fields["facts"])


class ConfigurationError(EpochsinkError, ValueError):
    """An option's value breaks a rule. Raised before any row moves."""


class CheckFailed(ConfigurationError):
    """The live systems do not fit the configuration; ``facts["findings"]`` lists every reason."""

    @classmethod
    def of(cls, findings: list[str]) -> Self:
        """Join findings, each a sentence with its own hint, into one error."""
        lines = "\n".join(f"  - {finding}" for finding in findings)
        return cls(f"{len(findings)} check(s) failed before any row moved:\n{lines}", findings=findings)


class UnsupportedQuery(EpochsinkError):
    """The streaming query runs in a mode in which its checkpoint cannot decide epochs."""


class PrepareFailed(EpochsinkError):
    """An epoch could not be prepared, so all that its attempt wrote is aborted, and Spark runs it again.

    Raised after the decision (the message says so), the target refuses to commit: the epoch stays recorded, and the
    next start commits it.
    """

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed: unless the sink's fact ``may_pass`` says that it needs an operator."""
        return str(self.facts.get("may_pass", True)) == "True"  # a task's facts come as text


class RowsRejected(PrepareFailed):
    """The target refuses rows for good (constraint, type, mapping). The epoch stays pending."""

    @property
    def may_pass(self) -> bool:
        """Never: the rows of an epoch are fixed."""
        return False


class Fenced(EpochsinkError):
    """Another driver has taken over this checkpoint. This one has stopped without writing anything."""


class WentBack(EpochsinkError):
    """Checkpoint, ledger and target disagree about the past: one of them is an older copy."""


class OutcomeUnknown(EpochsinkError):
    """An epoch is recorded, and whether the target committed it cannot be established now."""


class LedgerCorrupt(EpochsinkError):
    """A ledger entry exists and cannot be understood."""


class SpoolMissing(EpochsinkError):
    """The spool no longer holds an epoch's rows."""


class SpoolDamaged(SpoolMissing):
    """A file of the spool was cut or changed since it was written, or has an unknown format: none of it is applied."""


class LogIncomplete(SpoolMissing):
    """A Kafka topic no longer holds all records of a transaction whose rows are kept there: nothing is applied."""


class ServiceError(EpochsinkError):
    """A service for development, tests or the demo could not be fetched, started or stopped."""
