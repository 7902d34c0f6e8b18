"""A small pipeline in a process of its own, to be killed, left or superseded: see test_spark_processes.py.

    python folder_pipeline.py FOLDER END [MASTER]

END says how the program ends: `await` (availableNow), `stop` (by hand, once two epochs are decided, without waiting
for their commits), `leave` (likewise, without stop), or `never`. CHECKPOINT and
SPARK_SETTINGS (JSON) in the environment put its checkpoint elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fix_spark import spark_settings, start_session
from streams import Stream
from waiting import wait_until


def main(folder: Path, end: str, master: str = "local[2]") -> None:
    """Run the pipeline on the input, checkpoint and sink in `folder`."""
    more = json.loads(os.environ.get("SPARK_SETTINGS", "{}"))
    stream = Stream(start_session(master, {**spark_settings(folder), **more}), folder, os.environ.get("CHECKPOINT"))
    once = stream.exactly_once()
    if end == "await":
        stream.start(once).awaitTermination()
        return
    if end == "never":
        stream.start_endless(once).awaitTermination()
        return
    query = stream.by_hand(once, endless=True)
    wait_until(lambda: len(stream.committed()) > 1, "two epochs are decided")
    if end == "stop":
        query.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
