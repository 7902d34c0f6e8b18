"""A Python worker's part of an epoch, without Spark: prepares the pickled partition, and prints what it imported.

Run as `one_partition.py FILE`; the file holds a `WriteJob`, a `WriteOrder` and one partition's record batches. Prints
a JSON object: the `answers`, and the `imported` top-level packages.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path


def main() -> None:
    """Do the task."""
    job, order, batches = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - our own
    answers = [json.loads(row["answer"]) for rows in job.write(order, batches, 0) for row in rows.to_pylist()]
    imported = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stdout.write(json.dumps({"answers": answers, "imported": imported}))


if __name__ == "__main__":
    main()
