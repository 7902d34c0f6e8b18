"""Streams whose checkpoint is on a file system that takes no more, in a process of their own.

    [unshare -rm] python store_without_room.py FOLDER CASE...

A CASE is HOW-WHEN. HOW: `full` and `readonly` need mounts of the process' own; `limit` is the size of its files. WHEN:
`start`, or the step in which a stream waits meanwhile. Prints, as JSON, how each stream failed, and what the next start
made of it.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fix_spark import spark_settings, start_session
from folder_sink import FolderSink
from streams import Stream
from waiting import wait_until

from epochsink.errors import EpochsinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from epochsink.sink import SinkWriter, Task


@dataclass(frozen=True)
class LimitedSink(FolderSink):
    """A sink whose tasks may write files of at most ``limit`` bytes."""

    limit: int = resource.RLIM_INFINITY

    def writer(self, task: Task) -> SinkWriter:
        limit_files(self.limit)
        return super().writer(task)


def limit_files(size: int) -> None:
    """Let this process write files of at most ``size`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def mount(checkpoint: Path, *options: str) -> None:
    """Mount a small file system at the checkpoint, or change how it is mounted."""
    program = str(shutil.which("mount"))
    subprocess.run([program, "-t", "tmpfs", "-o", ",".join(options), "small", str(checkpoint)], check=True)


def play(stream: Stream, how: str, when: str) -> dict[str, Any]:
    """Run an epoch, have the next one fail, and start again once there is room."""
    if how != "limit":
        stream.checkpoint.mkdir()
        mount(stream.checkpoint, "size=1m")
    stream.put(range(3))
    stream.run()
    rows = 3 if how != "limit" else 5000
    stream.put(range(3, 3 + rows))
    small = LimitedSink(stream.sink.folder, limit=1 << 14) if how == "limit" else stream.sink
    once = stream.exactly_once({"folder": small})
    if when == "start" or how == "limit":
        take_room(stream.checkpoint, how)
        failure = failure_of(lambda: stream.run(once))
    else:
        stream.sink.faults.arm(when)
        query = stream.start(once)
        wait_until(lambda: stream.sink.faults.reached(when), f"the stream waits in its {when}")
        take_room(stream.checkpoint, how)
        stream.sink.faults.disarm(when)
        failure = failure_of(query.awaitTermination)
    visible = len(stream.sink.values())
    give_room(stream.checkpoint, how)
    stream.run(stream.exactly_once({"folder": LimitedSink(stream.sink.folder)}))
    is_exact = stream.sink.values() == list(range(3 + rows))
    return {**failure, "visible": visible, "is_exact": is_exact, "done": stream.done()}


def take_room(checkpoint: Path, how: str) -> None:
    """Let the checkpoint take nothing more."""
    if how == "readonly":
        mount(checkpoint, "remount", "ro")
    if how == "full":
        with (checkpoint / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                return


def give_room(checkpoint: Path, how: str) -> None:
    """Do what the hint says."""
    if how == "readonly":
        mount(checkpoint, "remount", "rw")
    if how == "full":
        (checkpoint / "filler").unlink()


def failure_of(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except EpochsinkError as failure:
        return {"kind": type(failure).__name__, "message": failure.message, "hint": failure.hint, "text": str(failure)}
    return {}


def main(folder: Path, *cases: str) -> None:
    """Play each case with a stream of its own."""
    spark = start_session("local[2]", spark_settings(folder))
    played = {}
    for case in cases:
        (folder / case).mkdir()
        played[case] = play(Stream(spark, folder / case), *case.split("-"))
    sys.stdout.write(json.dumps(played) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
