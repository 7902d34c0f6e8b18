"""Spark's executors, as a participant may use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Part = TypeVar("Part")
Answer = TypeVar("Answer")


class NotCarriedOut(Exception):
    """Executors did not do what they were asked for, or not all of it; the argument says why."""


class Executors(Protocol):
    """Spark's executors, for a commit that one process would take too long for."""

    def map(self, function: Callable[[Part], Answer], parts: Sequence[Part], patience: float) -> list[Answer]:
        """Call a function for each part on some executor, beside the stream; return the answers in order.

        All three must pickle. A part may be given to several at once, and one that was cut off may go on for long after
        this has returned or raised: only what is right to do again, and late, may be done there. Raises
        `NotCarriedOut`, also where for ``patience`` seconds no executor is there to take a part.
        """
