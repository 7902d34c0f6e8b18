"""A driver's memory does not grow with an epoch's ids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_ROWS = """
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from epochsink.elasticsearch import deduplicate

class Rows:
    def __init__(self, size):
        self.size = size

    def read(self, task):
        for start in range(0, self.size, 10_000):
            numbers = pa.array(np.arange(start, start + 10_000) % (self.size - 10_000)).cast(pa.string())
            yield pa.record_batch({"id": pc.binary_join_element_wise('"_id":"order-', numbers, '"}', "")})
"""

_LARGE_EPOCH = """
import re

def peak():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024

for size in (100_000, 1_000_000):
    assert deduplicate.count(Rows(size), ["task"], size) == (size, 10_000)
    assert deduplicate.survivors(Rows(size), ["task"], size).sum() == size - 10_000
    print(peak())
"""


def test_a_large_epoch_takes_hardly_more_memory_than_a_small_one() -> None:
    done = subprocess.run([sys.executable, "-c", _ROWS + _LARGE_EPOCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 120, "megabytes; with all ids in memory it is 250"


_FULL_FOLDER = """
import resource
from epochsink.elasticsearch.deduplicate import NoTemporaryFiles

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for way in (deduplicate.count, deduplicate.survivors):
    try:
        way(Rows(200_000), ["task"], 200_000)
    except NoTemporaryFiles as error:
        print(error.message, error.hint)
"""


def test_a_temporary_folder_without_room_is_named_with_what_is_wanted_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ROWS + _FULL_FOLDER],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for said in (first, second):
        assert f"temporary folder {tmp_path}/epochsink-" in said
        assert "File too large" in said
        assert re.search(r"200000 rows needs files of about [1-9]\d? MiB", said)
        assert "TMPDIR" in said
    assert list(tmp_path.iterdir()) == []
