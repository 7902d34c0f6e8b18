"""Submit the pipeline to YARN in cluster mode, and wait for its end. Run as ``python submit.py SPEC.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

import pyspark
from pipeline import Spec

_DRIVER: Final = Path(__file__).with_name("attempt.py")


def main() -> None:
    """Become spark-submit."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    names = [name for name in os.environ if name == "PYTHONPATH" or name.startswith("EPOCHSINK_FAILPOINT")]
    settings = {
        **spec.settings,
        "spark.submit.deployMode": "cluster",
        "spark.driver.extraJavaOptions": spec.jvm_options,
        **{f"spark.yarn.appMasterEnv.{name}": os.environ[name] for name in names},
    }
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = [f"--conf={name}={value}" for name, value in settings.items()]
    os.execv(program, [str(program), *options, str(_DRIVER), sys.argv[1]])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
