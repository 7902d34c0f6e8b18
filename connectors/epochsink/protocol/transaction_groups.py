"""Which sinks of a query prepare an epoch as one: those whose committers name the same group.

Most sinks are alone. What a group has prepared is recorded by each of its sinks as the same part, so that it is
committed, lost and prepared again as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from epochsink.sink import sharers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from epochsink.sink import Ballot, Committable, Epoch, SharingCommitter, SinkCommitter


def in_groups(sinks: Mapping[str, SinkCommitter], names: Collection[str]) -> list[list[str]]:
    """Return ``names`` in the order in which the query has them, the members of a group together.

    KeyError for one that the query does not have.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(names, key=dict(zip(sinks, range(len(sinks)), strict=True)).__getitem__):
        groups.setdefault(_group(sinks, name), []).append(name)
    return list(groups.values())


def group(sinks: Mapping[str, SinkCommitter], name: str) -> list[str]:
    """Return the sinks of the group of one sink, itself included."""
    return next(names for names in in_groups(sinks, sinks) if name in names)


def _group(sinks: Mapping[str, SinkCommitter], name: str) -> tuple[object, ...]:
    # a committer need not know of groups
    named = getattr(sinks[name], "group", None)
    return ("alone", name) if named is None else ("group", named)


def vote(epoch: Epoch, ballots: Mapping[str, Ballot]) -> dict[str, tuple[Committable, ...]]:
    """Let the sinks of one group vote; return the parts of each."""
    (name, first), *others = ballots.items()
    if not others:
        return {name: tuple(first.committer.vote(epoch, first.written, first.rows, first.after))}
    part = cast("SharingCommitter", first.committer).vote_together(epoch, ballots)
    return dict.fromkeys(ballots, (part,))


def replay(epoch: Epoch, part: Committable, sink: str, pending: Mapping[str, Ballot], attempt: str) -> Committable:
    """Prepare a lost part of ``sink`` again, for all whose rows it holds and whose shares are ``pending``."""
    ballots = {name: pending[name] for name in sharers(part, sink) if name in pending}
    first = next(iter(ballots.values()))
    if len(ballots) == 1:
        return first.committer.replay(epoch, part, first.rows, attempt, first.after)
    return cast("SharingCommitter", first.committer).replay_together(epoch, part, ballots, attempt)
