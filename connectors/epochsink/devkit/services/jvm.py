"""Services that are Java programs: how their JVM starts, and the archive of classes that makes short lives cheap."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from epochsink.devkit.services.cache import build_once, cache_folder
from epochsink.devkit.services.java import java
from epochsink.devkit.services.local import LocalService

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LIGHTLY: Final = "-XX:TieredStopAtLevel=1"
"""What a JVM optimises late is never reached in a short life."""

_FILE: Final = "classes.jsa"


def from_archive(archive: Path) -> list[str]:
    """Return the options of a JVM that starts from an archive of its classes, and says nothing if it cannot."""
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds*=off", "-Xlog:class+path=off"]


def fingerprint(program: str, jars: Iterable[Path], *more: str) -> str:
    """Return what an archive belongs to: a Java and jars, of which it refuses newer ones though they be the same."""
    dated = sorted((str(jar), jar.stat().st_mtime_ns) for jar in jars)
    return hashlib.sha256(repr((str(Path(program).resolve()), dated, more)).encode()).hexdigest()[:12]


class JavaService(LocalService):
    """A service in a JVM of its own.

    A `short_lived` one, as tests start many of, begins from an archive of its classes, which is made at the first such
    start on a machine, and compiles lightly: it needs a third of the processor time until it is ready, and serves more
    slowly later.
    """

    def __init__(
        self,
        settings: Mapping[str, str | int | bool] | None = None,
        *,
        short_lived: bool = False,
        home: Path | None = None,
        port: int | None = None,
        startup_timeout: float = 120,
        stop_timeout: float = 60,
    ) -> None:
        super().__init__(settings, home=home, port=port, startup_timeout=startup_timeout, stop_timeout=stop_timeout)
        self._short_lived = short_lived
        self._recorded_to: Path | None = None

    @abstractmethod
    def _jars(self) -> list[Path]:
        """Return all jars that the server's JVM loads classes from."""

    def _program(self) -> str:
        """Return the Java that runs the server."""
        return java()

    def _jvm(self) -> list[str]:
        """Return the beginning of the server's command."""
        if self._recorded_to is not None:
            return [self._program(), LIGHTLY, f"-XX:ArchiveClassesAtExit={self._recorded_to}", "-Xlog:disable"]
        return [self._program(), *([LIGHTLY, *self._from_archive()] if self._short_lived else [])]

    def _from_archive(self) -> list[str]:
        archive = self._archives() / _FILE
        return from_archive(archive) if archive.exists() else []  # not every Java can make one

    def _archives(self) -> Path:
        mark = fingerprint(self._program(), self._jars())
        return build_once(cache_folder() / "services" / f"{self.name}-{self.version}-{mark}", self._record)

    def _record(self, draft: Path) -> None:
        """Start and stop a server, whose JVM then writes down all classes that it has loaded."""
        recorded = type(self)()
        recorded._recorded_to = draft / _FILE  # noqa: SLF001 - of the same class
        with recorded:
            recorded.stop()
