"""The runs of a pipeline, one after the other; while one works, Spark is started for the next."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Self

from epochsink.devkit.demo.kill_plan import ANY_MOMENT
from epochsink.devkit.demo.pipeline_process import PipelineProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from epochsink.devkit.demo.kill_plan import Kill


class SuccessiveRuns:
    """One run for each kill, and one more. As a context manager, it ends the run that has yet to begin."""

    def __init__(self, command: Sequence[str], folder: Path, kills: Sequence[Kill]) -> None:
        self._command = command
        self._folder = folder
        self._numbers = itertools.count(1)
        self._armed = [None if kill.point == ANY_MOMENT else kill for kill in kills]
        self._armed.append(None)
        self._next: PipelineProcess | None = None

    def begin(self) -> PipelineProcess:
        """Let the next run begin; it is the caller's to end."""
        process = self._next or self._started()
        process.begin()
        self._next = self._started() if self._armed else None
        return process

    def _started(self) -> PipelineProcess:
        log = self._folder / f"run-{next(self._numbers)}.log"
        return PipelineProcess(self._command, log, self._armed.pop(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.end()
