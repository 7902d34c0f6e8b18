"""A disk that forgets what was not synced, as a machine's does that loses power.

A driver's process notes each fsync: the content of a file, or the names in a folder, as they are then. `forget` makes
of the tree what these notes alone say, which is the least that POSIX promises: a file that was never synced is empty, a
name that was never synced is gone, and one whose removal was not synced is back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Disk:
    """What of a ``tree`` of files is durable, noted in the folder ``notes`` of the same file system.

    ``given`` are the names that were there, durably, from the beginning.
    """

    def __init__(self, tree: Path, notes: Path, given: frozenset[str]) -> None:
        self._tree = tree
        self._notes = notes
        self._given = given

    def watch(self) -> None:
        """Note every fsync and fdatasync of this process from now on."""
        self._notes.mkdir(exist_ok=True)
        for name in ("fsync", "fdatasync"):
            self._note_each(name)

    def _note_each(self, name: str) -> None:
        sync = getattr(os, name)

        def synced(descriptor: int) -> None:
            sync(descriptor)
            self._note(descriptor)

        setattr(os, name, synced)

    def _note(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        note = self._notes / str(found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                names = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
            self._keep(note, json.dumps(names).encode())
        else:
            source = f"/proc/self/fd/{descriptor}"
            with open(source, "rb") as file:  # noqa: PTH123 - a name of the process's own
                content = file.read()
            self._keep(note, content)
            # a name of ours keeps the inode from being given to another file
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(os.readlink(source), note.with_suffix(".pin"))  # noqa: PTH115 - no path's own

    def _keep(self, note: Path, content: bytes) -> None:
        # the process may be killed at any time
        temporary = note.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(content)
        temporary.rename(note)

    def forget(self) -> None:
        """Make the tree what is durable."""
        self._restore(self._tree)

    def _restore(self, folder: Path) -> None:
        names: dict[str, list[int]] = json.loads(self._noted(folder.stat().st_ino) or b"{}")
        for entry in list(folder.iterdir()):
            inode = entry.stat().st_ino
            if (
                names.get(entry.name) != [inode, entry.is_dir()]
                and entry.relative_to(self._tree).as_posix() not in self._given
            ):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            elif entry.is_dir():
                self._restore(entry)
            else:
                entry.write_bytes(self._noted(inode) or b"")
        for name, (inode, is_folder) in names.items():
            pin = self._notes / f"{inode}.pin"
            # the inode of a folder that was removed may be a file's by now
            if not is_folder and pin.exists() and not (folder / name).exists():
                pin.write_bytes(self._noted(inode) or b"")
                os.link(pin, folder / name)

    def _noted(self, inode: int) -> bytes | None:
        try:
            return (self._notes / str(inode)).read_bytes()
        except FileNotFoundError:
            return None
