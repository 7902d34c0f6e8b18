"""Run functions of a sink's commit on Spark's executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Given = TypeVar("Given")
Answer = TypeVar("Answer")


class NotCarriedOut(Exception):
    """The executors did not do what they were asked for, or not all of it; the argument says why."""


class Executors(Protocol):
    """Spark's executors, for a commit that takes one process too long."""

    def map(self, function: Callable[[Given], Answer], parts: Sequence[Given], patience: float) -> list[Answer]:
        """Call a function for each part on some executor, beside the stream; return the answers in order.

        All three must pickle. Several executors may be given the same part, and a call that was cut off may run on
        long after this has returned or raised. So the function may only do what is right to do again, and late. Raises
        `NotCarriedOut`, also if no executor takes a part for ``patience`` seconds.
        """
