"""Read entries of Spark's logs in a checkpoint: ``offsets/``, ``commits/``, and those of its file sources.

Format: Spark's HDFSMetadataLog. A file is named by its number; line 1 is ``v<version>``. What a later version means is
not guessed: rows would be lost if an entry of another form looked like one without content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from epochsink.errors import UnsupportedQuery


@dataclass(frozen=True, slots=True)
class Log:
    """A kind of log: what Spark calls it, the newest version of its entries that is known, and the setting for it."""

    kind: str
    newest_known: int
    setting: str = ""

    def lines(self, name: str, data: bytes) -> list[str]:
        """Return the lines of an entry, the version first.

        Raises `UnsupportedQuery` for an unknown version, `ValueError` for an entry that is torn.
        """
        text = data.decode()
        # not splitlines(): a path may contain other characters that end a line for Python
        lines = text.removesuffix("\n").split("\n")
        version = re.fullmatch(r"v(\d+)", lines[0])
        if version is None:
            raise ValueError(f"its first line is {lines[0][:20]!r} and not a version")
        if not 1 <= int(version[1]) <= self.newest_known:
            older = f" after setting {self.setting}={self.newest_known}" if self.setting else ""
            raise UnsupportedQuery(
                f"{name} of the checkpoint has version {version[1]} of Spark's {self.kind}, and epochsink knows none "
                f"after {self.newest_known}: what it says of an epoch cannot be told",
                hint="install a version of epochsink that supports this version of Spark; or, with this version, "
                f"start on a new checkpoint{older}",
            )
        return lines


OFFSETS: Final = Log("offset log", 2, "spark.sql.streaming.offsetLog.formatVersion")
COMMITS: Final = Log("commit log", 3)
"""What its entries hold besides (state, watermark, from 3 on sinks) does not matter: that there is one decides."""
FILES: Final = Log("log of a file source", 1)


@dataclass(frozen=True, slots=True)
class OffsetEntry:
    """An entry of the offset log: its version, its header, and a line for each source, in the order of the digest."""

    version: str
    header: dict[str, Any]
    lines: list[str]

    @classmethod
    def parse(cls, name: str, data: bytes) -> OffsetEntry:
        """Return an entry. Raises as `Log.lines` does."""
        version, header, *lines = OFFSETS.lines(name, data)
        parsed = json.loads(header)
        if not isinstance(parsed, dict):
            raise ValueError("its second line is not an object")  # noqa: TRY004 - of the file, not of an argument
        # the order of named sources is Spark's own
        return cls(version, parsed, lines if version == "v1" else sorted(lines))

    def by_line(self) -> list[tuple[str, str]]:
        """Return each source's id, which names its folder, and its offset.

        The id is a source's place in the query; from version 2 on, it is in the line, and may be a name.
        """
        if self.version == "v1":
            return [(str(place), line) for place, line in enumerate(self.lines)]
        return [(identifier, offset) for identifier, _, offset in (line.partition(":") for line in self.lines)]
