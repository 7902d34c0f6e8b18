"""The sinks of a driver as an operator's command wants them: ``--sinks nemesis.operated:SINKS``."""

import json
import os
from pathlib import Path

from pipeline import Spec, sinks

from nemesis.set_back import SPEC

SINKS = dict(sinks(Spec(**json.loads(Path(os.environ[SPEC]).read_text()))))
