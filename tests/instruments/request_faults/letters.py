"""One retry of dead letters in a process of its own, with a fault at one of its requests, and others beside it.

A `Scene` is a target on a real server with dead letters that it would take by now. The first play of a scene, without a
fault, lists the requests of a retry.
"""

from __future__ import annotations

import os
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, Protocol
from unittest import mock

from waiting import wait_until

import epochsink.elasticsearch.letters as of_elasticsearch
import epochsink.postgres.letters as of_postgres
from epochsink.elasticsearch import bulk_body
from epochsink.errors import EpochsinkError
from epochsink.sink import Chosen, Retried, participants_of
from request_faults.wire import Fate, Seen, Strike, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from epochsink.sink import Identity, Letters, Sink
    from request_faults.wire import Framing

SECONDS: Final = 60.0
Requests = list[Seen]
FATES: Final = tuple(fate for fate in Fate if fate not in (Fate.REFUSED, Fate.SURVIVES, Fate.FORGETS))
"""The others come to the same: no command takes another one over, and none keeps anything on its machine's disk."""
RETRY, DROP, EPOCH = "another retry", "a drop", "an epoch with a newer row"


class Scene(Protocol):
    """One target, with a query that has left dead letters."""

    identity: Identity
    port: int
    once: bool
    """Whether of all commands just one may say of a letter that it has settled it."""
    fates: Sequence[Fate]
    beside: Sequence[str]
    """Who may do something while the retry is stopped."""

    @property
    def framing(self) -> Callable[[], Framing]:
        """What tells the server's requests apart."""

    def sink(self, port: int) -> Sink:
        """Return the sink that goes through a port."""

    def lay(self) -> None:
        """Begin anew: the letters are there, and the target would take their rows."""

    def write_newer(self) -> None:
        """Run an epoch with a newer row of a letter's key."""

    def strikes(self, requests: Requests) -> Requests:
        """Choose the requests that faults strike."""

    def is_blocked(self) -> bool:
        """Return whether somebody waits for a lock."""

    def flaws(self, *, dropped: bool, newer: bool) -> list[str]:
        """Return what is wrong with the rows, when no letter should be left."""


@dataclass(frozen=True)
class Hit:
    """A fault at the n-th request of a label, and who does something meanwhile."""

    label: str
    nth: int
    fate: Fate
    beside: str = ""

    def __str__(self) -> str:
        return f"request {self.nth} of «{self.label}»: {self.fate.value}; {self.beside}"


@dataclass(frozen=True)
class Played:
    """What a play has shown."""

    hit: Hit | None
    flaws: list[str]
    answer: object
    requests: Requests
    struck: bool

    def __str__(self) -> str:
        return "\n  ".join([str(self.hit), *self.flaws, f"the retry said: {self.answer!r}"])


@contextmanager
def opened(sink: Sink, identity: Identity) -> Iterator[Letters]:
    """Lend the letters of a sink as a command of an operator does."""
    (participant,) = participants_of({identity.sink: sink})
    with closing(participant):
        participant.open(identity)
        found = participant.operator().letters(identity.sink)
        assert found is not None
        yield found


def hits(scene: Scene, requests: Requests) -> Iterator[Hit]:
    """Yield each fault at each request, with everybody who may do something while the retry is stopped."""
    for request in scene.strikes(requests):
        for fate in (fate for fate in request.fates if fate in scene.fates):
            beside = {Fate.PAUSED: scene.beside, Fate.HELD: [RETRY]}.get(fate, [""])
            yield from (Hit(request.label, request.nth, fate, each) for each in beside)


def play(scene: Scene, wire: Wire, hit: Hit | None = None, mutant: str = "") -> Played:
    """Retry all letters with a fault, then once more without; judge what is there."""
    scene.lay()
    strike = Strike(hit.label, hit.nth, hit.fate) if hit else Strike("", 0, None)
    ours, theirs = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_retry, args=(scene.sink(wire.port), scene.identity, mutant, theirs))
    strike.kill = lambda: os.kill(process.pid, signal.SIGKILL)
    strike.pause = lambda: os.kill(process.pid, signal.SIGSTOP)
    strike.resume = lambda: os.kill(process.pid, signal.SIGCONT)
    wire.arm(strike)
    process.start()
    theirs.close()
    told: list[object] = []
    try:
        wait_until(lambda: strike.struck.is_set() or not process.is_alive(), "the fault", SECONDS)
        with ThreadPoolExecutor(1) as pool:
            if hit and hit.beside and strike.struck.is_set():
                other = pool.submit(_beside, scene, hit.beside)
                wait_until(lambda: other.done() or scene.is_blocked(), hit.beside, SECONDS)
                strike.release.set()
                told.append(other.result(SECONDS))
                if hit.fate is Fate.HELD:
                    assert strike.delivered.wait(SECONDS), "what was held is not delivered"
        process.join(SECONDS)
        assert not process.is_alive(), f"the retry does not end: {hit}"
        answer = _answer(ours)
        requests = list(wire.log)
    finally:
        strike.release.set()
        wire.let_go()
        process.kill()
        process.join(SECONDS)
        ours.close()
    return Played(hit, _judged(scene, hit, [answer, *told]), answer, requests, strike.struck.is_set())


def _answer(told: Connection) -> object:
    try:
        return told.recv()
    except EOFError:
        return "died"


def _judged(scene: Scene, hit: Hit | None, told: list[Any]) -> list[str]:
    flaws = []
    fate = hit.fate if hit else None
    well = isinstance(told[0], Retried)
    if fate in (None, Fate.PAUSED, Fate.TWICE) and not well:
        flaws.append("a retry that lives, with a connection that holds, does not say what it has done")
    if fate in (Fate.BUSY, Fate.FORBIDDEN) and isinstance(told[0], str):
        flaws.append("a retry that is refused ends with an error that no command explains")
    if fate is Fate.REPLY_LOST and not well and told[0][:1] != ("OutcomeUnknown",):
        flaws.append("a retry whose reply is lost does not say that its outcome is unknown")
    with opened(scene.sink(scene.port), scene.identity) as letters:
        told.append(letters.retry(Chosen()))
        if left := letters.count(Chosen()):
            flaws.append(f"{left} letters are left")
    beside = hit.beside if hit else ""
    flaws += scene.flaws(dropped=beside == DROP, newer=beside == EPOCH)
    settled = [each.written + each.superseded if isinstance(each, Retried) else each for each in told]
    counts = [each for each in settled if isinstance(each, int)]
    expected = len(LETTERS)
    if scene.once and (sum(counts) > expected or (len(counts) == len(told) and sum(counts) != expected)):
        flaws.append(f"{told} settle {sum(counts)} letters of {expected}")
    return flaws


LETTERS: Final = ("a", "b", "c")
"""The keys of the letters: two of one epoch, and one of the next."""


def _beside(scene: Scene, what: str) -> object:
    if what == EPOCH:
        scene.write_newer()
        return 0
    with opened(scene.sink(scene.port), scene.identity) as letters:
        return letters.drop(Chosen()) if what == DROP else letters.retry(Chosen())


def _retry(sink: Sink, identity: Identity, mutant: str, tell: Connection) -> None:
    """Be the command, in a process of its own."""
    try:
        with MUTANTS[mutant](), opened(sink, identity) as letters:
            tell.send(letters.retry(Chosen()))
    except EpochsinkError as failure:
        tell.send((type(failure).__name__, str(failure)))
    except BaseException:  # noqa: BLE001 - the parent calls it a flaw
        tell.send(traceback.format_exc())
    os._exit(0)


_FORKS: Final[Any] = get_context("fork")


def _each_statement_commits() -> Any:
    return mock.patch.multiple(of_postgres, transaction=lambda _: nullcontext(), commit=lambda _: None)


def _knows_no_version() -> Any:
    def action_heads(version: int, **fields: Any) -> Any:
        return real(version=version + 1000, **fields)

    real = bulk_body.action_heads
    return mock.patch.object(bulk_body, "action_heads", action_heads)


def _deletes_first() -> Any:
    def retry(letters: Any, poster: Any, epoch: Any, hits: Any) -> Any:
        letters._delete(epoch, hits)
        return real(letters, poster, epoch, hits)

    real = of_elasticsearch.ElasticsearchLetters._retry
    return mock.patch.object(of_elasticsearch.ElasticsearchLetters, "_retry", retry)


MUTANTS: Final[dict[str, Callable[[], Any]]] = {
    "": nullcontext,
    "each statement commits": _each_statement_commits,
    "writes a version of its own": _knows_no_version,
    "deletes the letters first": _deletes_first,
}
