"""Define what a sink writes to: one index, the indices that rows name, or a data stream.

They differ in what an ``_id`` guarantees. In an index it is unique and has a version, so a request can be repeated. In
a data stream it is unique within one backing index only, and has no version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from epochsink.elasticsearch import index_settings, pipelines
from epochsink.elasticsearch.applied_epochs import MarkerDocument
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import UnfitIndex
from epochsink.elasticsearch.indices import refresh
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.errors import WentBack


@dataclass(frozen=True, slots=True)
class ElasticsearchTarget:
    """What a sink writes to, as the server has just described it: an index, or several that are used like one.

    ``index`` is the index or data stream, and only shown if rows name several. ``settings`` has the flat settings of
    each index by its name. ``beside`` has those of the other indices that the sink writes to: markers and dead letters.
    """

    index: str
    settings: Mapping[str, Mapping[str, str]]
    beside: Mapping[str, Mapping[str, str]]

    @property
    def incarnations(self) -> dict[str, tuple[str, str]]:
        """The uuid and history of each index. If they are different, documents applied before may be missing.

        A restore over a closed index keeps its uuid and changes its history, which is "" before the first restore.
        """
        return {
            name: (settings["index.uuid"], settings.get("index.history.uuid", ""))
            for name, settings in self.settings.items()
        }

    @property
    def incarnation(self) -> tuple[str, str]:
        """The uuid and history of the one index, "" for several."""
        return "", ""

    @property
    def indices(self) -> Mapping[str, tuple[str, str]]:
        """The `incarnations` of several indices; nothing for one, which the marker names itself."""
        return self.incarnations

    @property
    def stream(self) -> Mapping[str, tuple[str, str]] | None:
        """The uuid and history of the backing index to which a data stream appends; None for any other target."""
        return None

    @property
    def appends(self) -> bool:
        """Whether documents can only be appended: the target accepts neither versions nor deletes."""
        return self.stream is not None

    @property
    def written(self) -> Mapping[str, Mapping[str, str]]:
        """The settings of each index that documents are written to now."""
        return self.settings

    @property
    def unchecked(self) -> Mapping[str, Mapping[str, str]]:
        """Those of `written` that `check` may not have seen."""
        return self.written

    @property
    def posted_to(self) -> str:
        """What requests name; "" if each operation names its own index."""
        return self.index

    def index_behind(self, name: str) -> str:
        """Return the index that stores documents which are sent to ``name``."""
        return name

    @property
    def refreshes_itself(self) -> bool:
        """Whether searches see new documents without an explicit refresh."""
        return all(settings.get("index.refresh_interval", "1s") != "-1" for settings in self.settings.values())

    def refresh(self, server: ElasticsearchServer) -> None:
        """Make all documents searchable. Raises `NotServed`."""
        for name, settings in self.settings.items():
            # A server may not report the number of primary shards.
            refresh(server, name, int(settings.get("index.number_of_shards", 1)))

    def stored_in(self, pipeline: str | None) -> str | None:
        """Return the indices in which documents pass a pipeline, which could send them elsewhere (see `Poster`)."""
        piped = [name for name, settings in self.settings.items() if pipelines.named(settings, pipeline)]
        return ", ".join(piped) or None

    def unfit_settings(self, config: ElasticsearchConfig) -> list[UnfitIndex]:
        """Return the wrong settings of the indices that are written to, and of those beside them."""
        written = self.written.items()
        return [unfit for each in written for unfit in index_settings.unfit(*each, self.beside, config)]

    def unfit_columns(self, columns: Collection[str]) -> list[str]:  # noqa: ARG002 - an index takes any
        """Return why rows of those columns do not fit."""
        return []

    def require_unchanged(self, kept: MarkerDocument | None) -> None:
        """Raise `WentBack` if an index that the marker names is missing, or another one now."""
        for name, incarnation in (kept.indices if kept else {}).items():
            if kept and self.incarnations.get(name) != incarnation:
                raise WentBack(
                    f"the index {name!r} was deleted, created again or restored since epoch {kept.epoch}, and may lack "
                    "what was applied before",
                    hint=f"if that was meant, type: epochsink accept CHECKPOINT {kept.epoch} --sink NAME; else fill it "
                    "from the source with a new checkpoint",
                    index=name,
                )

    def since(self, first: Mapping[str, object] | None) -> ElasticsearchTarget:  # noqa: ARG002 - only a stream grows
        """Return the target without the indices that are older than ``first``, if that still exists."""
        return self

    def not_the_one(self, kept: MarkerDocument, difference: str, reason: str) -> WentBack:
        """Return the error for a target that the marker's epoch was not applied to."""
        return WentBack(
            f"the index {self.index!r} is not the one that epoch {kept.epoch} was applied to "
            f"({difference}), and may lack what was applied before: {reason}",
            hint=f"if it holds everything up to that epoch, or does not need to, type: epochsink accept CHECKPOINT "
            f"{kept.epoch} --sink NAME; else fill it from the source with a new checkpoint",
            index=self.index,
        )
