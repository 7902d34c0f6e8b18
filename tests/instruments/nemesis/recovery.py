"""How long the first epoch after a healing took, and what that time was made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

QUIET_LOAD: Final = 4.0
"""The load for each core, most of it of the run's own making, up to which runs have gone on within 30 s."""
LONGEST: Final = 4.0
"""How many times as long one waits on a busy machine, at the most: a query that waits for ever is found there too."""
STEPS: Final = ("driver", "driver ended", "invoked", "raised", "returned", "committed")


def patience(seconds: float, load: float, cores: int) -> float:
    """Return how long to wait for what takes ``seconds`` at the most, if all that runs has to share the cores."""
    return seconds * min(LONGEST, max(1.0, load / (QUIET_LOAD * cores)))


@dataclass(frozen=True)
class Recovery:
    """One wait for an epoch, from the healing on; ``load`` is the load average then, others' work included."""

    began: float
    seconds: float
    load: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s at load {self.load:.1f}"

    def steps(self, folder: Path) -> list[str]:
        """Return what happened meanwhile, each with the seconds since the healing, as lines for a person."""
        files = (folder / "timeline.jsonl", folder / "history" / "history.jsonl")
        events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        within = [one for one in events if self.began - 1 <= one["at"] <= self.began + self.seconds + 1]
        told = [(one["at"] - self.began, one, _kind(one)) for one in sorted(within, key=lambda one: float(one["at"]))]
        return [f"{after:+.1f} s {kind}{_facts(one)}" for after, one, kind in told if kind in STEPS]


def _kind(event: dict[str, Any]) -> str:
    return str(event.get("what", event.get("event")))


def _facts(event: dict[str, Any]) -> str:
    shown = {name: event[name] for name in ("number", "epoch", "why", "error", "canary") if event.get(name)}
    return "".join(f" {name}={str(value)[:160]}" for name, value in shown.items())
