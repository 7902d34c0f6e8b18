"""Environments as users have them: a fresh one, the wheel, and pip.

Run as ``python environments.py WHEEL FOLDER`` it makes those that are chosen below FOLDER, with the extras
[spark,postgres] alone; and for each a client of Spark Connect, with pyspark-client in place of PySpark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
OLDEST: Final = ROOT / "locks" / "versions-oldest.lock"
VERSIONS: Final[dict[str, tuple[str, ...]]] = {
    "oldest": ("-c", str(OLDEST)),
    "newest": (),
    "4.1": ("pyspark==4.1.*",),
    "4.2": ("pyspark==4.2.*",),
}
"""What pip is told besides the wheel. Nothing is pinned but where the name says so."""
CLIENTS: Final[dict[str, tuple[str, ...]]] = {
    "oldest": ("pyspark-client==4.0.0", "-c", str(OLDEST)),
    "newest": ("pyspark-client<4.4",),
    "4.1": ("pyspark-client==4.1.*",),
    "4.2": ("pyspark-client==4.2.*",),
}
"""The same for a client of Spark Connect that has no JVM."""

CHOSEN: Final = tuple(os.environ.get("EPOCHSINK_VERSIONS", "oldest newest").split())
_PYTHONS: Final = {"oldest": ("3.11",), "newest": ("3.13", "3.12", "3.11")}
_TRIES: Final = 5
_SPARK: Final = (
    "--master local[2] --conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress=false "
    "--conf spark.driver.host=127.0.0.1 --conf spark.sql.shuffle.partitions=2 --driver-memory 512m "
    # quick to start: to compile takes longer than to interpret for a handful of rows
    "--conf spark.sql.codegen.wholeStage=false --driver-java-options '-XX:TieredStopAtLevel=1 -XX:+UseSerialGC' "
    "pyspark-shell"
)


@dataclass(frozen=True)
class Environment:
    """One environment with the package in it."""

    name: str
    folder: Path
    wheel: Path
    has_jvm: bool = True

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self, extras: str = "spark,postgres") -> None:
        """Make it anew, with these extras, or for a client without a JVM."""
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([_python(self.name), "-m", "venv", self.folder], check=True, env=_environment())
        if self.has_jvm:
            self.install(extras)
        else:
            self.pip(str(self.wheel), *CLIENTS[self.name])

    def install(self, extras: str) -> None:
        """Install the wheel with extras, as the README says."""
        self.pip(f"{self.wheel}[{extras}]", *VERSIONS[self.name])

    def pip(self, *asked: str) -> None:
        """Install what is asked for; again where a download breaks off."""
        for attempt in range(_TRIES):
            command: list[str | Path] = [
                self.folder / "bin" / "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *asked,
            ]
            if subprocess.run(command, check=False, env=_environment()).returncode == 0:
                return
            time.sleep(5 * attempt)
        raise RuntimeError(f"pip did not install {asked} in {_TRIES} tries")

    def run(
        self, program: str, *arguments: str | Path, folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its programs in a folder, with the environment activated and nothing of this project in sight."""
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=folder,
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    def variables(self, **more: str) -> dict[str, str]:
        """Return the variables of a process that has the environment activated."""
        path = {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYSPARK_SUBMIT_ARGS": _SPARK}
        return {**_environment(), **path, **more}


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}


def _python(name: str) -> str:
    """Return the first interpreter for a name that is there, and runs: a shim may be there and refuse."""
    for version in _PYTHONS.get(name, ("3.12", "3.11")):
        for found in (f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
            if shutil.which(found) and _works(found):
                return found
    return sys.executable


def _works(python: str) -> bool:
    return subprocess.run([python, "-c", "import ensurepip"], check=False, capture_output=True).returncode == 0


def all_in(wheel: Path, folder: Path) -> dict[str, Environment]:
    """Return the environments that were chosen, by name."""
    return {name: Environment(name, folder / name, wheel) for name in CHOSEN}


def for_demo(environment: Environment) -> Environment:
    """Return the environment for the extra [demo], which may want an older PySpark, whose Kafka source is published."""
    return replace(environment, folder=environment.folder.with_name(f"{environment.name}-demo"))


def client_of(environment: Environment) -> Environment:
    """Return the client of Spark Connect for a server in an environment."""
    folder = environment.folder.with_name(f"{environment.name}-client")
    return replace(environment, folder=folder, has_jvm=False)


if __name__ == "__main__":
    full = [*all_in(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()).values()]
    clients = [client_of(each) for each in full]
    with ThreadPoolExecutor() as pool:
        list(pool.map(Environment.make, [*full, *clients]))
