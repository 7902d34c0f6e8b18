"""Fix what the code asks of its machine, so that a plan always plays the same way, and writes the same ledger."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from epochsink import retry
from epochsink.kafka.committable import KafkaCommittable
from epochsink.postgres.server import Server
from epochsink.protocol import ledger, ledger_entries, progress_tracker
from epochsink.protocol.ledger_entries import Entry, decode
from epochsink.retry import Result, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STILL: Final = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0)
"""A clock that stands. Stamps and progress use it, and the protocol concludes nothing from these."""
MOST_DECODED: Final = 4096


class Decoded(dict[bytes, Entry]):
    """Entries by what the ledger's files hold: up to their first fault, all plans for the same sinks write the same.

    Plans share them, so nothing may change an entry, not even a mutant.
    """

    def __missing__(self, data: bytes) -> Entry:
        if len(self) >= MOST_DECODED:
            self.clear()
        self[data] = entry = decode(data)
        return entry


class Parsed:
    """What a parser makes of values that never change, such as the parts in a ledger: of each once."""

    def __init__(self, parse: Callable[[Any], Any]) -> None:
        self._parse = parse
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """Return it."""
        known = self._known.get(id(value))
        if known is None:
            # the value as well: while it is here, nothing else has its id
            known = self._known[id(value)] = value, self._parse(value)
        return known[1]


DECODED: Final = Decoded()
SERVERS: Final = Parsed(Server.of)
"""Plans have the same few configurations."""
TURNS: Final = 3


class Repeating(RetryPolicy):
    """What `epochsink.retry.retrying` returns: a few attempts and no pauses, unless it was given another clock."""

    def __call__(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Call a function until it succeeds, fails for good, or has had its turns."""
        if self.sleep is not time.sleep:
            return super().__call__(function, *args, **kwargs)
        for left in range(TURNS - 1, -1, -1):
            try:
                return function(*args, **kwargs)
            except BaseException as failure:
                if not left or not self.is_passing(failure):
                    raise
        raise AssertionError("unreachable")


@contextmanager
def determined(look_at_clock: Callable[[], int]) -> Iterator[None]:
    """Make every uuid4 the next number, have ledgers look at a clock of the simulation's, and stop all others."""
    numbers = count(1)
    parsed = Parsed(KafkaCommittable.from_json)
    fixed: list[tuple[Any, str, Any]] = [
        (uuid, "uuid4", lambda: SimpleNamespace(hex=f"{next(numbers):032x}")),
        (ledger, "_clock", look_at_clock),
        (ledger, "decode", DECODED.__getitem__),
        (ledger_entries, "time", STILL),
        (progress_tracker, "time", STILL),
        (retry, "RetryPolicy", Repeating),
        (KafkaCommittable, "from_json", parsed),
        (Server, "of", SERVERS),
    ]
    real = [getattr(module, name) for module, name, _ in fixed]
    for module, name, value in fixed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(fixed, real, strict=True):
            setattr(module, name, value)
