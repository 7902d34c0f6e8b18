"""Run OpenSearch as a plain process from its published Maven artifacts, as `LocalElasticsearch` runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from epochsink_devkit.services import versions
from epochsink_devkit.services.elasticsearch import LocalElasticsearch, copy_http_module

# the artifact has none; the build adds it to the archive that is published elsewhere
_DESCRIPTOR: Final = """\
name=transport-netty4
description=HTTP and transport over Netty
version={version}
opensearch.version={version}
java.version={java}
classname=org.opensearch.transport.{plugin}
has.native.controller=false
"""


class LocalOpenSearch(LocalElasticsearch):
    """One OpenSearch node of version 2.19; `settings` are as in opensearch.yml.

    It is the server's core, without its plugins: no security, no index state management.
    """

    name = "opensearch"
    major = 2

    @functools.cached_property
    def release(self) -> versions.OpenSearchRelease:
        return versions.OPENSEARCH[self.major]

    def _install_http_module(self, module: Path) -> None:
        copy_http_module(self.release, module)
        release = self.release
        described = _DESCRIPTOR.format(version=self.version, java=release.java_minimum, plugin=release.http_class)
        (module / "plugin-descriptor.properties").write_text(described)


class LocalOpenSearch3(LocalOpenSearch):
    """One OpenSearch node of the newest version 3."""

    major = 3
