"""Pass settings to the pipeline's process, as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from epochsink_devkit.demo.destination import Destination
from epochsink_devkit.demo.index import ElasticsearchIndex
from epochsink_devkit.demo.table import PostgresTable, UpsertedTable
from epochsink_devkit.demo.topic import KafkaTopic

KINDS: Final[dict[str, Any]] = {
    "postgres": PostgresTable,
    "upserted": UpsertedTable,
    "elasticsearch": ElasticsearchIndex,
    "kafka": KafkaTopic,
}
"""Every kind of destination."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """One pipeline: its source, its checkpoint, its destinations, and whether it uses epochsink.

    ``epochs`` is the file to which it adds a line for each visible epoch. ``connect``: on Spark Connect.
    """

    bootstrap_servers: str
    topic: str
    checkpoint: str
    orders_per_epoch: int
    plain: bool
    jvm_options: str
    master: str
    epochs: str
    destinations: Mapping[str, Destination]
    connect: bool = False

    def save(self, path: Path) -> None:
        """Write the settings to a file."""
        names = {kind: name for name, kind in KINDS.items()}
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "destinations"}
        destinations = {
            name: {"kind": names[type(one)], "options": asdict(one)}  # type: ignore[call-overload] # dataclasses all
            for name, one in self.destinations.items()
        }
        path.write_text(json.dumps({**fields, "destinations": destinations}))

    @classmethod
    def load(cls, path: Path) -> PipelineSettings:
        """Read the file that `save` wrote."""
        fields = json.loads(path.read_text())
        destinations = {
            name: KINDS[spec["kind"]](**spec["options"]) for name, spec in fields.pop("destinations").items()
        }
        return cls(**fields, destinations=destinations)
