"""Reads of a checkpoint's store are repeated after a passing failure, and writes never."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from py4j.protocol import Py4JNetworkError

from epochsink.protocol.storage import LocalStorage
from epochsink.spark import retried_reads
from epochsink.spark.retried_reads import RetriedReads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READS: dict[str, Callable[[RetriedReads], object]] = {
    "read": lambda files: files.read("commits/7"),
    "names": lambda files: files.names("commits"),
}


class Flaky(LocalStorage):
    """Fails as often as there are failures left."""

    def __init__(self, root: Path, *failures: OSError) -> None:
        super().__init__(root)
        self.failures = list(failures)
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop()

    def read(self, name: str) -> bytes | None:
        self._fail()
        return super().read(name)

    def names(self, folder: str) -> list[str]:
        self._fail()
        return super().names(folder)

    def create(self, name: str, data: bytes) -> bool:
        self._fail()
        return super().create(name, data)


def no_jvm() -> OSError:
    failure = OSError("Answer from Java side is empty")
    failure.__cause__ = Py4JNetworkError("Answer from Java side is empty")
    return failure


@pytest.mark.parametrize(("kind", "answer"), [("read", b"v1"), ("names", ["7"])])
def test_a_failure_that_passes_is_not_seen(tmp_path: Path, kind: str, answer: object) -> None:
    LocalStorage(tmp_path).create("commits/7", b"v1")
    flaky = Flaky(tmp_path, OSError("503 Slow Down"), OSError("connection reset"))
    assert READS[kind](RetriedReads(flaky)) == answer
    assert flaky.calls == 3


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize(
    "failure",
    [PermissionError("no"), OSError("java.io.InterruptedIOException: stopped"), no_jvm()],
    ids=["no right", "stopped query", "no JVM"],
)
def test_a_failure_that_stays_is_raised_at_once(tmp_path: Path, kind: str, failure: OSError) -> None:
    flaky = Flaky(tmp_path, failure)
    with pytest.raises(OSError) as raised:  # noqa: PT011 - which one is asserted
        READS[kind](RetriedReads(flaky))
    assert raised.value is failure
    assert flaky.calls == 1


def test_the_last_failure_is_raised_when_retries_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retried_reads, "RETRY_SECONDS", 0.05)
    with pytest.raises(OSError, match="away"):
        RetriedReads(Flaky(tmp_path, *[OSError("away")] * 100)).read("commits/7")


def test_a_write_is_never_repeated(tmp_path: Path) -> None:
    """It may have been carried out: who wrote it must not conclude that somebody else did."""
    flaky = Flaky(tmp_path, OSError("no answer"))
    with pytest.raises(OSError, match="no answer"):
        RetriedReads(flaky).create("epochsink/ledger/0", b"{}")
    assert flaky.calls == 1
