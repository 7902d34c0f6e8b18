"""Compare sinks with their live targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.errors import CheckFailed
from epochsink.sink import participants_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from epochsink.sink import Sink


def refuse_unfit(sinks: Mapping[str, Sink], schemas: Mapping[str, pa.Schema]) -> None:
    """Raise `CheckFailed` with every finding of every sink; ``schemas`` are those of its selected rows, by name."""
    findings = []
    for participant in participants_of(sinks):
        try:
            for name in participant.members:
                findings += [f"sink '{name}': {finding}" for finding in participant.check(name, schemas[name])]
        finally:
            # the run opens participants of its own, for a query id that may not be known yet
            participant.close()
    if findings:
        raise CheckFailed.of(findings)
