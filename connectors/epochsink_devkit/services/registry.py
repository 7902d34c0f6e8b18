"""Run a schema registry on loopback: Apicurio, which has the API of Confluent's and keeps everything in memory."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Final

from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.cache import build_once, cache_folder
from epochsink_devkit.services.java import LIGHTLY, java
from epochsink_devkit.services.local import LocalService
from epochsink_devkit.services.ports import LOOPBACK

HEAP: Final = "384m"
_API: Final = "/apis/ccompat/v7"


class LocalRegistry(LocalService):
    """One schema registry. It loses all schemas when it stops."""

    name = "registry"
    version = versions.REGISTRY

    @property
    def url(self) -> str:
        """For its clients."""
        return f"http://{LOOPBACK}:{self.port}{_API}"

    @property
    def address(self) -> str:
        """The URL."""
        return self.url

    def _prepare(self) -> None:
        unpacked()

    def _command(self) -> list[str]:
        (program,) = unpacked().glob("*-runner.jar")
        listen = (f"-Dquarkus.http.host={LOOPBACK}", f"-Dquarkus.http.port={self.port}")
        return [java(), f"-Xmx{HEAP}", LIGHTLY, *listen, "-jar", str(program)]

    def _is_ready(self) -> bool:
        return self._answers_well(f"{_API}/subjects")


def unpacked() -> Path:
    """Return the folder with the registry's program; the first call fetches it."""
    bundle = versions.REGISTRY_BUNDLE

    def unpack(draft: Path) -> None:
        with tarfile.open(archive) as packed:
            packed.extractall(draft, filter="data")

    archive = fetch(bundle) / bundle.artifacts[0].file_name
    return build_once(cache_folder() / "services" / bundle.name, unpack)
