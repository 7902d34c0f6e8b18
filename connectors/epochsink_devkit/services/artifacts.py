"""Fetch Maven artifacts with the Ivy that PySpark ships, once per user."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.sax.saxutils import quoteattr

import pyspark
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from epochsink.errors import ServiceError
from epochsink.retry import retrying
from epochsink_devkit.services import versions
from epochsink_devkit.services.cache import build_once, cache_folder
from epochsink_devkit.services.java import java
from epochsink_devkit.services.versions import LOCKED_SPARK, Artifact, Bundle, postgres_jdbc, spark_kafka

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.5
_JARS = Path(pyspark.__file__).parent / "jars"
# No organisation in the name: if a jar has no descriptor, Java derives the module's name from the file name.
_PATTERN = "[artifact]-[revision](-[classifier]).[ext]"
_TAIL_LINES = 30


class _IvyFailed(Exception):
    """One run of Ivy failed."""


def spark_ivy_settings() -> Path:
    """Return the Ivy settings file that the services use, for Spark's `spark.jars.ivySettings`."""
    return Path(__file__).with_name("ivysettings.xml")


def spark_packages() -> list[Path]:
    """Local jars of Spark's Kafka source and sink and of PostgreSQL's JDBC driver, with their dependencies.

    Join them with commas for `spark.jars`: a session then starts without resolving anything. Jars that PySpark ships
    are left out. The first call fetches them. Raises `ServiceError` if that fails.
    """
    bundle = Bundle(
        f"spark-{pyspark.__version__}",
        (spark_kafka(), postgres_jdbc()),
        exclude_modules=_shipped_modules(),
        locked=pyspark.__version__ == LOCKED_SPARK,
    )
    return sorted(fetch(bundle).glob("*.jar"))


def spark_coordinates() -> list[str]:
    """Return the same as Maven coordinates, for `spark.jars.packages` together with `spark_ivy_settings()`."""
    return [spark_kafka().coordinate, postgres_jdbc().coordinate]


def spark_avro() -> list[Path]:
    """Local jars of Spark's functions for Avro, as `spark_packages`."""
    bundle = Bundle(
        f"spark-avro-{pyspark.__version__}",
        (versions.spark_avro(),),
        exclude_modules=_shipped_modules(),
        locked=pyspark.__version__ == LOCKED_SPARK,
    )
    return sorted(fetch(bundle).glob("*.jar"))


def fetch(bundle: Bundle) -> Path:
    """Return the folder with a bundle's jars, named `module-version.jar`. The first call fetches them.

    Safe to call from several processes. Raises `ServiceError` if the registry is unreachable or a digest is wrong.
    """
    module = ivy_module(bundle)
    digest = hashlib.sha256(f"{_PATTERN}\n{module}".encode()).hexdigest()[:12]
    return build_once(cache_folder() / "bundles" / f"{bundle.name}-{digest}", lambda draft: _fill(draft, bundle))


def ivy_module(bundle: Bundle) -> str:
    """Return the bundle as an Ivy module descriptor."""
    dependencies = "".join(map(_dependency, bundle.artifacts))
    excludes = "".join(f"    <exclude module={quoteattr(module)}/>\n" for module in bundle.exclude_modules)
    return (
        '<ivy-module version="2.0">\n'
        '  <info organisation="epochsink" module="bundle"/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        f"  <dependencies>\n{dependencies}{excludes}  </dependencies>\n"
        "</ivy-module>\n"
    )


def _dependency(artifact: Artifact) -> str:
    start = (
        f"    <dependency org={quoteattr(artifact.organisation)} name={quoteattr(artifact.module)}"
        f' rev={quoteattr(artifact.version)} conf="default->default"'
    )
    if artifact.classifier is None:
        return f"{start}/>\n"
    kind = quoteattr(artifact.extension)
    return (
        f'{start} transitive="false"><artifact name={quoteattr(artifact.module)} type={kind} ext={kind} '
        f'xmlns:m="http://ant.apache.org/ivy/maven" m:classifier={quoteattr(artifact.classifier)}/></dependency>\n'
    )


def verify(folder: Path, bundle: Bundle) -> None:
    """Compare every fetched jar with its recorded digest. Raises `ServiceError` if one differs or is missing."""
    for artifact in bundle.artifacts:
        if not (folder / artifact.file_name).is_file():
            raise ServiceError(f"{artifact.coordinate} was fetched without its file")
    recorded = _locked() | {one.file_name: one.sha256 for one in bundle.artifacts if one.sha256}
    for jar in sorted(each for each in folder.iterdir() if each.suffix != ".xml"):
        with jar.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if jar.name not in recorded and not bundle.locked:
            continue
        if digest != recorded.get(jar.name):
            raise ServiceError(
                f"{jar.name} of {bundle.name} has sha256 {digest}, expected {recorded.get(jar.name, 'none')}",
                hint=f"remove {cache_folder()} and try again; if it fails again, the registry serves a different file",
            )


@functools.cache
def _locked() -> dict[str, str]:
    """Return the recorded digest of each jar."""
    lines = Path(__file__).with_name("jars.sha256").read_text().splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {name: digest for digest, name in pairs}


def _fill(draft: Path, bundle: Bundle) -> None:
    module = draft / "ivy.xml"
    module.write_text(ivy_module(bundle))
    command = [
        *(java(), "-jar", str(_ivy_jar()), "-settings", str(spark_ivy_settings())),
        *("-cache", str(cache_folder() / "ivy"), "-ivy", str(module), "-confs", "default"),
        *("-retrieve", str(draft / _PATTERN)),
    ]
    with _progress() as progress:
        task = progress.add_task(f"fetching {bundle.name}", total=None, note="")
        try:
            again = retrying(_has_failed, attempts=ATTEMPTS, first_pause=FIRST_PAUSE_SECONDS, longest_pause=8.0)
            again(lambda: _run_ivy(command, progress, task))
        except _IvyFailed as reason:
            raise _unfetched(bundle, str(reason)) from reason
    verify(draft, bundle)


def _unfetched(bundle: Bundle, told: str) -> ServiceError:
    """Return the error for a bundle, with the artifacts that the registry lacks if Ivy names them."""
    missing = [":".join(parts) for parts in re.findall(r"^:: (\S+)#(\S+?);(\S+): not found$", told, re.MULTILINE)]
    if not missing:
        return ServiceError(
            f"could not fetch {bundle.name} in {ATTEMPTS} attempts:\n{told}",
            hint="check that this machine reaches Maven Central; what was fetched is kept, so try again",
        )
    hint = "if your registry is a mirror, have it fetch them from Maven Central"
    if pyspark.__version__ != LOCKED_SPARK and any(name.startswith("org.apache.spark:") for name in missing):
        hint = f"install the newest PySpark for which they were published: pip install pyspark=={LOCKED_SPARK}"
    return ServiceError(f"could not fetch {bundle.name}: the registry has no {', no '.join(missing)}", hint=hint)


def _has_failed(failure: BaseException) -> bool:
    return isinstance(failure, _IvyFailed)


def _run_ivy(command: list[str], progress: Progress, task: TaskID) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
        assert ivy.stdout  # noqa: S101 - for the type checker
        for line in _lines(ivy.stdout):
            tail.append(line)
            _show(line, progress, task)
    # Ivy ends with status 0 after some failures, so read its report.
    if ivy.returncode != 0 or any("UNRESOLVED" in line or "FAILED" in line for line in tail):
        raise _IvyFailed("\n".join(tail))


def _lines(stream: IO[str]) -> Iterator[str]:
    for line in stream:
        if (text := line.strip()) and not text.startswith("."):
            yield text


def _show(line: str, progress: Progress, task: TaskID) -> None:
    if match := re.match(r"found (\S+)#(\S+);(\S+)", line):
        progress.update(task, total=(progress.tasks[0].total or 0) + 1, note=f"{match[2]} {match[3]}")
    elif match := re.match(r"\[SUCCESSFUL \] (\S+)#(\S+?);", line):
        progress.update(task, advance=1, note=match[2])


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} jars  {task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _ivy_jar() -> Path:
    for jar in sorted(_JARS.glob("ivy-*.jar")):
        return jar
    raise ServiceError(f"PySpark has no ivy-*.jar in {_JARS}", hint="install pyspark from its wheel")


@functools.cache
def _shipped_modules() -> tuple[str, ...]:
    names = (re.match(r"(.+?)-\d", jar.name) for jar in sorted(_JARS.glob("*.jar")))
    return tuple(dict.fromkeys(name[1] for name in names if name))
