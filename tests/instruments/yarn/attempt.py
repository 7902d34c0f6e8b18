"""The pipeline's driver in an application master, once for each attempt. YARN runs it with the path of a spec."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from pipeline import Spec, run

from epochsink_devkit.history import HistoryLog


def main() -> None:
    """Run the pipeline under a name that no other attempt has."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    number = os.environ["CONTAINER_ID"].split("_")[-2]
    spec = replace(spec, driver=f"{spec.driver}-{number}")
    HistoryLog(Path(spec.history)).write("started", run=spec.run, driver=spec.driver, armed="")
    run(spec)


if __name__ == "__main__":
    main()
