"""Finding a Java that runs the services."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from epochsink.errors import ServiceError
from epochsink.services.versions import JAVA_MINIMUM

_WAY_OUT = f"install Java {JAVA_MINIMUM} (e.g. apt-get install openjdk-{JAVA_MINIMUM}-jre-headless) or set JAVA_HOME"


def java() -> str:
    """Path of the `java` program, from JAVA_HOME or else the PATH.

    ServiceError, with what to install, when there is none or it is too old.
    """
    program = _find()
    if program is None:
        raise ServiceError("no Java found", way_out=_WAY_OUT)
    major = _major_version(program)
    if major < JAVA_MINIMUM:
        raise ServiceError(f"{program} is Java {major}, {JAVA_MINIMUM} is needed", way_out=_WAY_OUT)
    return program


def _find() -> str | None:
    home = os.environ.get("JAVA_HOME")
    if home and (program := Path(home, "bin", "java")).is_file():
        return str(program)
    return shutil.which("java")


@functools.cache
def _major_version(program: str) -> int:
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', shown)
    if not found:
        raise ServiceError(f"{program} -version does not name a version: {shown.strip()!r}", way_out=_WAY_OUT)
    return int(found[1])
