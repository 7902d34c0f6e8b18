"""Ports as the participants that the coordinator asks: each alone, or those of one database together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epochsink.kafka.repair import reapply
from epochsink.sink import Outcome, Participant, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.sink import (
        Ballot,
        Ballots,
        Committable,
        Committables,
        Epoch,
        Identity,
        LastDone,
        Parts,
        Recorded,
        Recorder,
        Verdict,
    )
    from simulation.port import PortBase


class PortParticipant(Participant):
    """Asks each port for its own sink; what several have prepared as one is committed by the first of them."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        super().__init__(members)
        self.repairs = all(port.repairs for port in members.values())

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Ask the port."""
        found: dict[str, Any] = self.members[sink].initial_state()
        return found

    def open(self, identity: Identity) -> None:
        """Tell the port."""
        port = self.members[identity.sink]
        port.require_ours = self.require_ours
        port.open(identity)

    def fence(self) -> None:
        """Have each port take its fence."""
        for port in self.members.values():
            port.fence()

    def newest(self, sink: str) -> int | None:
        """Ask the port."""
        found: int | None = self.members[sink].newest()
        return found

    def leftovers(self, sink: str) -> list[str]:
        """Ask the port."""
        found: list[str] = self.members[sink].leftovers()
        return found

    def newest_generation(self, sink: str) -> int:
        """Ask the port."""
        found: int = self.members[sink].newest_generation()
        return found

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Ask the port."""
        self.members[sink].verify_applied(done, pending)

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Have the port vote, or the first for all."""
        (name, ballot), *others = ballots.items()
        if not others:
            return {name: self.members[name].vote(epoch, ballot.parts, ballot.rows, ballot.after)}
        part = self.members[name].vote_together(epoch, self._voters(ballots))
        return {letter: [part] for letter in ballots}

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Have each port commit what no other one has committed for it."""
        verdicts: dict[str, Sequence[Verdict]] = {}
        committed: list[Committable] = []
        for name, ballot in ballots.items():
            verdicts[name] = self._commit(self.members[name], epoch, ballot, committed)
            for part, verdict in zip(ballot.parts, verdicts[name], strict=True):
                if verdict.outcome is Outcome.COMMITTED:
                    committed.append(part)
        return verdicts

    def _commit(self, port: Any, epoch: Epoch, ballot: Ballot, committed: Sequence[Committable]) -> list[Verdict]:
        def commit(part: Committable) -> Verdict:
            verdict: Verdict = port.commit(epoch, part, ballot.rows, ballot.after)
            return verdict

        known = {index for index, part in enumerate(ballot.parts) if part in committed}
        return one_by_one(ballot.parts, commit, known | {*port.commit_at_once(epoch, ballot.parts, ballot.after)})

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Have the port prepare a part again, or the first for all that share it."""
        (name, ballot), *others = ballots.items()
        replayed: Committable = (
            self.members[name].replay_together(epoch, part, self._voters(ballots), attempt)
            if others
            else self.members[name].replay_of(epoch, part, ballot, attempt)
        )
        return replayed

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Ask the port, part by part."""
        return [part for part in done.parts if self.members[sink].lacks(done, part)]

    def reapply(self, epoch: Epoch, ballots: Ballots, record: Recorder) -> Mapping[str, Sequence[Verdict]]:
        """Have the ports commit what is still prepared, and prepare the rest again, as `epochsink.postgres.repair`."""
        if "K" in self.members:
            return reapply(self, epoch, ballots, self.members["K"].holds, record)
        verdicts: dict[str, list[Verdict]] = {name: [] for name in ballots}
        parts: list[Committable] = []
        for part in (part for ballot in ballots.values() for part in ballot.parts):
            if part not in parts:
                parts.append(part)
        for part in parts:
            shared = {name: replace(each, parts=[part]) for name, each in ballots.items() if part in each.parts}
            found = self.commit(epoch, shared)
            if any(verdict.outcome is Outcome.ABORTED for (verdict,) in found.values()):
                again = self.replay(epoch, part, shared, part["attempt"])
                shared = {name: replace(ballot, parts=[again]) for name, ballot in shared.items()}
                found = self.commit(epoch, shared)
            for name, verdict in found.items():
                verdicts[name] += verdict
            if any(verdict.outcome is not Outcome.COMMITTED for (verdict,) in found.values()):
                break
            self.finish(epoch, shared)
        return verdicts

    def _voters(self, ballots: Ballots) -> dict[str, tuple[Any, Ballot]]:
        return {name: (self.members[name], ballot) for name, ballot in ballots.items()}

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """Have each port sweep."""
        return [line for port in self.members.values() for line in port.abort_orphans(keep, done)]

    def unblock(self, epoch: Epoch, ballots: Ballots, recorded: Callable[[], Recorded]) -> list[str]:
        """Have each port end what keeps readers back."""
        return [line for name, ballot in ballots.items() for line in self.members[name].unblock(ballot.parts, recorded)]

    def await_visible(self, epoch: Epoch, ballots: Ballots) -> None:
        """Have each port look."""
        for name, ballot in ballots.items():
            self.members[name].await_visible(epoch, ballot.parts, ballot.after)

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Have each port clear away."""
        for name, ballot in ballots.items():
            self.members[name].finish(epoch, ballot.parts)


def participants(ports: Mapping[str, PortBase]) -> list[Participant]:
    """Return the participants of some ports."""
    groups: dict[str, dict[str, PortBase]] = {}
    for letter, port in ports.items():
        groups.setdefault(port.group or letter, {})[letter] = port
    return [PortParticipant(members) for members in groups.values()]
