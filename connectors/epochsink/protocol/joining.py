"""Decide whether a ledger may begin on a running pipeline's checkpoint, and tell which sinks come and go."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from epochsink.errors import ConfigurationError, epochs
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger_entries import Take
from epochsink.sink import Participant

_log = logging.getLogger("epochsink")

REWRITE: Final = "rewrite"
"""The value of ``join_running`` that allows to join in the middle of an epoch."""


def refuse_begun(checkpoint: Checkpoint, decided: int, *, rewrite: bool) -> None:
    """Refuse to join a pipeline that has begun an epoch after ``decided``; with ``rewrite``, warn.

    Spark runs that epoch again. What the pipeline has written of it before is not known here. Raises
    `ConfigurationError`.
    """
    begun = checkpoint.newest_begun()
    if begun <= decided:
        return
    if not rewrite:
        raise ConfigurationError(
            f"epoch {begun} was begun before epochsink joined this pipeline, and not decided (there is an "
            f"offsets/{begun} and no commits/{begun}): the old code may have written a part of its rows. Spark runs it "
            "again, so these rows would be duplicated in a target without a key",
            hint="start the old code once more with trigger(availableNow=True), which ends when its last epoch is "
            f"decided, and then this; or, if every target has a key, or you have removed the rows of epoch {begun} "
            f"from those without one, start once with join_running={REWRITE!r}",
        )
    _log.warning(
        "epochsink joins at epoch %d, which Spark has already begun. If the old code began it, the rows that it has "
        "written are written again: remove them from a target without a key, or they are duplicated. They "
        "are the rows between offsets/%d and offsets/%d of the checkpoint",
        begun,
        decided,
        begun,
    )


def family_of(participant: Participant) -> str:
    """Return which of this package's kinds of sink a participant is of, as its folder is named; "" for others."""
    package, _, module = type(participant).__module__.partition(".")
    return module.partition(".")[0] if package == "epochsink" else ""


def refuse_other_kind(participant: Participant, origins: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a sink whose name the ledger knows as that of a sink of another kind. Raises `ConfigurationError`.

    What that one has recorded, this one cannot read. Of a sink that joined under an older version, the kind is not
    known.
    """
    now = family_of(participant)
    for name in participant.members:
        before = origins.get(name, {}).get("family", now)
        if before != now:
            raise ConfigurationError(
                f"sink '{name}' was of the kind {before or 'of your own'!r} when it joined this query, and is of the "
                f"kind {now or 'of your own'!r} now: a sink of another kind needs a new name",
                hint="give it a name that this query has not had; it begins with the next epoch. If the old sink has "
                "an epoch pending (epochsink status CHECKPOINT), start once more with the old one before",
            )


def log_changed_sinks(owner: Take, present: Collection[str], newest: int) -> None:
    """Tell which sinks are new, are gone, or come back: a new name is a new sink, also for the same target.

    ``owner`` is the take before, ``newest`` the newest epoch that the ledger knows.
    """
    for name in owner.origins:
        if name not in present:
            _log.warning(
                "sink '%s' is no longer part of this query: its target keeps what it holds and gets no more rows. If "
                "it was renamed, give it its old name back",
                name,
            )
    for name in present:
        if name not in owner.origins:
            _log.warning(
                "sink '%s' joins this query after epoch %d: the rows of earlier epochs are not written to it",
                name,
                newest,
            )
        elif (last := owner.left.get(name, newest)) < newest:
            _log.warning(
                "sink '%s' returns to this query, which ran without it after epoch %d: the rows of %s are not written "
                "to it. To add them, load their input (offsets/ in the checkpoint) into its target with a separate "
                "query",
                name,
                last,
                epochs(last + 1, newest),
            )
