"""What the daemons of HDFS and of YARN have in common: their jars, their command and their settings files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import pyspark

from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.java import LIGHTLY, console_logging, java

HEAP: Final = "256m"
# YARN's web pages make classes with an older Guice
_OPENED: Final = ("--add-opens=java.base/java.lang=ALL-UNNAMED",)
# PySpark ships Hadoop's client jars, and the daemons run on their classes.
_SHIPPED: Final = ("hadoop-client-*.jar", "slf4j-api-*.jar", "log4j-*.jar", "jcl-over-slf4j-*.jar")


def daemon(main: str, settings: Path, *bundles: versions.Bundle) -> list[str]:
    """Return the command of a daemon of these bundles, with a folder of settings files; write there how it logs."""
    (settings / "log4j2.properties").write_text(console_logging("error"))
    class_path = ":".join(map(str, [settings, *_jars(bundles)]))
    return [java(), LIGHTLY, f"-Xmx{HEAP}", "-XX:+UseSerialGC", *_OPENED, "-cp", class_path, main]


def write_site(path: Path, properties: Mapping[str, str]) -> None:
    """Write a settings file."""
    lines = (
        f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
        for name, value in properties.items()
    )
    path.write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")


def _jars(bundles: Sequence[versions.Bundle]) -> list[Path]:
    shipped = Path(pyspark.__file__).parent / "jars"
    jars = [jar for pattern in _SHIPPED for jar in shipped.glob(pattern)]
    return [*jars, *(jar for bundle in bundles for jar in sorted(fetch(bundle).glob("*.jar")))]
