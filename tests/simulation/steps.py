"""One I/O step of a simulated process: where the scheduler may switch threads and where a fault may strike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")


class Stepper(Protocol):
    """Carries out one I/O step.

    Raises OSError where the caller does not learn the outcome. ``apply`` may run later, twice or never.
    """

    def __call__(self, name: str, apply: Callable[[], Answer], *, reads: bool = False) -> Answer: ...


def at_once(name: str, apply: Callable[[], Answer], *, reads: bool = False) -> Answer:  # noqa: ARG001 - a Stepper
    """Carry out a step without a scheduler and without faults."""
    return apply()
