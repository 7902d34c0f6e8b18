"""The retry policy: passing failures again, others at once, and never for ever."""

from __future__ import annotations

import time

import pytest

from epochsink.retry import retrying


class Flaky:
    """Fails a number of times."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise ConnectionError("not yet")
        return "done"


def is_passing(error: BaseException) -> bool:
    return isinstance(error, ConnectionError)


def test_a_passing_failure_is_tried_again() -> None:
    flaky = Flaky(2)
    assert retrying(is_passing, seconds=10, first_pause=0.001)(flaky) == "done"
    assert flaky.calls == 3


def test_attempts_are_counted_and_the_last_failure_comes_as_it_is() -> None:
    flaky = Flaky(9)
    with pytest.raises(ConnectionError, match="not yet"):
        retrying(is_passing, attempts=3, first_pause=0.001)(flaky)
    assert flaky.calls == 3


def test_time_is_bounded() -> None:
    flaky, begun = Flaky(10**6), time.monotonic()
    with pytest.raises(ConnectionError):
        retrying(is_passing, seconds=0.2, first_pause=0.01, longest_pause=0.02)(flaky)
    assert time.monotonic() - begun < 60


def test_other_failures_are_raised_at_once() -> None:
    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        retrying(is_passing, seconds=10)(broken)


def test_a_policy_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="never end"):
        retrying(is_passing)


class Paused:
    """A clock that only pauses move on."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def time(self) -> float:
        return self.monotonic()

    def monotonic(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float, /) -> None:
        self.pauses.append(seconds)


def test_pauses_are_random_and_grow_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, most: most)
    clock = Paused()
    assert retrying(is_passing, attempts=9, first_pause=1.0, longest_pause=5.0, clock=clock)(Flaky(5)) == "done"
    assert clock.pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_no_attempt_begins_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, most: most)
    flaky = Flaky(9)
    with pytest.raises(ConnectionError):
        retrying(is_passing, seconds=3.0, first_pause=1.0, clock=Paused())(flaky)
    assert flaky.calls == 3


def test_another_function_may_make_the_pauses() -> None:
    pauses: list[float] = []
    assert retrying(is_passing, attempts=2, sleep=pauses.append)(Flaky(1)) == "done"
    assert len(pauses) == 1


def test_a_failure_does_not_name_the_one_before_it() -> None:
    with pytest.raises(ConnectionError) as failure:
        retrying(is_passing, attempts=2, first_pause=0.001)(Flaky(2))
    assert failure.value.__context__ is None
