"""Make recorded parts visible: commit them, prepare again what the target has lost, and commit that.

A run, `epochsink recover`, `epochsink resolve` and `epochsink repair` commit in this way. What differs is a `Policy`.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from epochsink.errors import OutcomeUnknown
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.ledger_entries import Prepared, Replay
from epochsink.protocol.run_state import RunState
from epochsink.protocol.sweep import recorded_parts
from epochsink.sink import Ballots, Outcome, Participant, Recorded, Verdict

Indices = Mapping[str, Sequence[int]]
"""Some parts of an epoch: their indices in the record of each sink."""
REPLAY_TURNS: Final = 4
"""How often a part is prepared again before the query stops: each turn needs a new loss in the target."""


@dataclass(frozen=True)
class Policy(ABC):
    """Who commits which epoch; the defaults are those of a decided epoch that is not done."""

    run: RunState
    participant: Participant
    number: int
    again: ClassVar[bool] = False
    """Whether the epoch is done, and is applied again."""

    def recorded(self) -> Prepared:
        """Return the epoch as it is recorded by now, with every replay. Raises `Fenced`."""
        return self.run.ledger.own().epochs[self.number]

    def ballots(self, prepared: Prepared, sinks: Iterable[str], only: Indices | None = None) -> Ballots:
        """Return what the participant needs for some sinks' parts: all, or those at the indices ``only``."""
        return self.run.ballots(prepared, sinks, only)

    @abstractmethod
    def compare(self, sink: str) -> None:
        """Compare a sink's target with the ledger, before each commit and each replay. Raises `WentBack`."""

    def note(self, sink: str, verdicts: Mapping[int, Verdict]) -> None:
        """Take note of what the target says of a sink's parts, by index."""
        del sink, verdicts

    def is_lost(self, sink: str, index: int, verdict: Verdict) -> bool:
        """Return whether a part that is not committed is to be prepared again; else it counts as committed."""
        del index
        if verdict.outcome is Outcome.UNKNOWN:
            raise self.unknown(sink, verdict.evidence)
        return True

    def unknown(self, sink: str, evidence: str) -> OutcomeUnknown:
        """Return the error for a part of which it is unknown whether it is committed."""
        return consistency.unknown_outcome(self.number, sink, evidence)

    def record(self, replay: Replay) -> None:
        """Record what was prepared again, before its commit. Raises `Fenced`."""
        self.run.ledger.append(replay)

    def named(self) -> Recorded:
        """Return the recorded parts, which nothing may abort. Raises `Fenced`."""
        return recorded_parts(self.participant, self.run.ledger.verify())


class CommitEngine:
    """Commits the parts that one participant has of one epoch. May be repeated at any time.

    Raises `Fenced`, and what the policy and the participant raise.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._run = policy.run
        self._participant = policy.participant

    def commit(self, remaining: Indices) -> bool:
        """Commit some parts, replaying what the target has lost; return False if the epoch proves to be done."""
        policy, names, replays = self._policy, list(remaining), Counter[tuple[tuple[str, ...], int]]()
        while remaining:
            # each sink before the commit: what they share becomes visible for all. And again after a replay, which
            # takes long enough for a driver on another copy of the checkpoint to commit
            for name in names:
                policy.compare(name)
            reach("coordinator.commit.compared")
            # the newest record, not what was read before: the replays of the last turn are in it
            prepared = policy.recorded()
            with self._run.if_ours(self._participant):
                answers = self._participant.commit(prepared.at, policy.ballots(prepared, remaining, remaining))
            verdicts = {name: _tried(dict(zip(remaining[name], answers[name], strict=True))) for name in remaining}
            for name, of_parts in verdicts.items():
                policy.note(name, of_parts)
            open_parts = [
                (name, index, verdict)
                for name, of_parts in verdicts.items()
                for index, verdict in of_parts.items()
                if verdict.outcome is not Outcome.COMMITTED
            ]
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if not open_parts or (policy.number in self._run.ledger.verify().done and not policy.again):
                return not open_parts
            lost = [(name, index) for name, index, verdict in open_parts if policy.is_lost(name, index, verdict)]
            # what several sinks share is prepared again once
            for sinks, index in dict.fromkeys((_sharers(prepared, lost, *each), each[1]) for each in lost):
                self._replay(sinks, index)
                replays[sinks, index] += 1
            if REPLAY_TURNS in replays.values():
                raise policy.unknown(lost[0][0], f"prepared again {REPLAY_TURNS} times, and lost each time")
            remaining = _remaining(remaining, verdicts, lost)
        return True

    def await_visible(self, sinks: Iterable[str], only: Indices | None = None) -> list[str]:
        """Wait until readers see some sinks' parts; return a line for each thing that kept them back, and was ended."""
        prepared = self._policy.recorded()
        ballots = self._policy.ballots(prepared, sinks, only)
        with self._run.if_ours(self._participant):
            return self._participant.visible(prepared.at, ballots, self._policy.named)

    def _replay(self, sinks: Sequence[str], index: int) -> None:
        """Prepare a part of some sinks again, and record it."""
        policy = self._policy
        # a marker that is missing proves nothing if those of earlier epochs are missing too
        for name in self._participant.members:
            policy.compare(name)
        with self._run.queue.replaying(), self._run.if_ours(self._participant):
            reach("coordinator.replay.before")
            self._run.ledger.verify()
            prepared = policy.recorded()
            parts = prepared.parts_of(sinks[0])
            attempt, ballots = "" if policy.again else uuid.uuid4().hex, policy.ballots(prepared, sinks)
            replayed = self._participant.replay(prepared.at, parts[index], ballots, attempt)
            if replayed == parts[index]:
                return
            reach("coordinator.replay.prepared")
            policy.record(Replay(policy.number, tuple(sinks), (*parts[:index], replayed, *parts[index + 1 :])))
        self._run.progress.replayed(policy.number, sinks)
        reach("coordinator.replay.after")


def _tried(verdicts: dict[int, Verdict]) -> dict[int, Verdict]:
    """Leave out parts that were not tried, because the outcome of one before is unknown: they have its verdict."""
    unknown = next((index for index, one in verdicts.items() if one.outcome is Outcome.UNKNOWN), None)
    if unknown is None or any(one != verdicts[unknown] for index, one in verdicts.items() if index > unknown):
        return verdicts
    return {index: one for index, one in verdicts.items() if index <= unknown}


def _sharers(prepared: Prepared, lost: Collection[tuple[str, int]], name: str, index: int) -> tuple[str, ...]:
    """Return the sinks that have lost the same part."""
    part = prepared.parts_of(name)[index]
    return tuple(
        one for one in prepared.sharers(name) if (one, index) in lost and prepared.parts_of(one)[index] == part
    )


def _remaining(remaining: Indices, verdicts: Mapping[str, Collection[int]], lost: Sequence[tuple[str, int]]) -> Indices:
    """Return the parts to commit next: those that were not tried, and those that were prepared again."""
    still = {
        name: [index for index in indices if index not in verdicts[name] or (name, index) in lost]
        for name, indices in remaining.items()
    }
    return {name: indices for name, indices in still.items() if indices}
