"""Compare versions of epochsink before a task unpickles what the driver sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from pyspark import cloudpickle

from epochsink import __version__
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

Given = TypeVar("Given")
Answer = TypeVar("Answer")

_FOUND: Final = "<found>"


def with_same_version(function: Callable[[Given], Answer]) -> Callable[[Given], Answer]:
    """Return a function for tasks that calls ``function`` if the executor has the driver's version of epochsink.

    With another version it fails with `ConfigurationError`, in the text of the task's error.
    """
    # bytes until the versions are compared: dataclasses are unpickled by the position of their fields, so that a field
    # which only one version has would shift the others
    sealed = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    expected, unset = __version__, _FOUND
    refusal = other_version("an executor", _FOUND).to_line()

    def run(given: Given) -> Answer:
        # a function inside a function is pickled as code: the executor needs no epochsink to unpickle it
        import pickle  # noqa: PLC0415

        import epochsink  # noqa: PLC0415

        if epochsink.__version__ != expected:
            raise RuntimeError(refusal.replace(unset, epochsink.__version__))
        answer: Answer = pickle.loads(sealed)(given)  # noqa: S301 - the driver's own
        return answer

    return run


def other_version(place: str, found: str, sent: str = __version__) -> ConfigurationError:
    """Return the error for a ``place`` that has version ``found`` of epochsink, another than the sender's."""
    return ConfigurationError(
        f"{place} has epochsink {found}, and the driver has {sent}: a task would misread what the driver sends",
        hint=f"install epochsink {sent} in the Python of every executor (PYSPARK_PYTHON), then start the query "
        "again; no row of the epoch is visible",
    )
