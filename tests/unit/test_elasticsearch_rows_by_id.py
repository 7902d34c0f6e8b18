"""A driver's memory does not grow with an epoch's ids."""

from __future__ import annotations

import subprocess
import sys

_LARGE_EPOCH = """
import re
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

def peak():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024

for size in (100_000, 1_000_000):
    assert deduplicate.count(Rows(size), ["task"], size) == (size, 10_000)
    assert deduplicate.survivors(Rows(size), ["task"], size).sum() == size - 10_000
    print(peak())
"""


def test_a_large_epoch_takes_hardly_more_memory_than_a_small_one() -> None:
    done = subprocess.run([sys.executable, "-c", _LARGE_EPOCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 120, "megabytes; with all ids in memory it is 250"
