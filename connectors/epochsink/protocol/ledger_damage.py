"""Read what the other entries of a damaged ledger say: for people only, no query starts from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from epochsink.protocol.ledger import FOLDER, name_of
from epochsink.protocol.ledger_entries import decode
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.storage import Storage


@dataclass(frozen=True, slots=True)
class Damage:
    """An entry that cannot be used: its file, why, and what its bytes still say (``kind`` "", ``epoch`` None: nothing).

    ``after`` is the newest epoch that the entries before it name, -1 for none.
    """

    file: str
    reason: str
    kind: str
    epoch: int | None
    after: int

    @property
    def epochs(self) -> Sequence[int]:
        """The epochs at stake: its own; if it is not known, the one before, which it may end, and the next."""
        if self.epoch is not None:
            return [self.epoch]
        return [] if self.kind == "take" else [number for number in (self.after, self.after + 1) if number >= 0]

    def __str__(self) -> str:
        what = f"an entry '{self.kind}'" if self.kind else "an entry of unknown kind"
        which = f" of epoch {self.epoch}" if self.epoch is not None else f", written after one of epoch {self.after}"
        return f"{self.file} cannot be read ({self.reason}): {what}{which if self.epochs else ''}"


def survey(files: Storage) -> tuple[LedgerHistory, list[Damage]]:
    """Return what the readable entries say, and every damaged one: for people only. May raise OSError."""
    history, damages = LedgerHistory(), []
    numbers = sorted(int(name) for name in files.names(FOLDER) if name.isdigit())
    # below a gap are remains of a prefix that was being removed
    first = max((number for number in numbers if number - 1 not in numbers), default=0)
    for number in (number for number in numbers if number >= first):
        name = name_of(number)
        data = files.read(name) or b""
        try:
            history.add(decode(data))
        except (ValueError, KeyError, TypeError) as broken:
            damages.append(_damage(name, data, str(broken) or type(broken).__name__, history.newest))
    return history, damages


def _damage(name: str, data: bytes, reason: str, after: int) -> Damage:
    kind = re.search(rb'"entry": ?"(\w+)"', data)
    # the first one: committables further on may have an "epoch" of their own
    epoch = re.search(rb'"epoch": ?(\d+)', data) if kind and kind[1] != b"take" else None
    return Damage(name, reason, kind[1].decode() if kind else "", int(epoch[1]) if epoch else None, after)
