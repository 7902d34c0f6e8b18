"""The pipeline under the nemesis, which goes on until it is told to end. Run as ``python driver.py SPEC.json STOP``.

It ends in order when the file STOP is there and all of the source is decided.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pipeline import Spec, exactly_once, start_spark, stream

LOOK_SECONDS = 1


def main() -> None:
    """Process rows as they come."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    stop = Path(sys.argv[2])
    frame = stream(spec, start_spark(spec))
    query = exactly_once(spec).start(frame.writeStream.trigger(processingTime="300 milliseconds"))
    while not query.awaitTermination(LOOK_SECONDS):
        if stop.exists():
            # the input ends with the file's making: an idle trigger after it has seen all
            query.processAllAvailable()
            time.sleep(LOOK_SECONDS)
            query.stop()
            return


if __name__ == "__main__":
    main()
