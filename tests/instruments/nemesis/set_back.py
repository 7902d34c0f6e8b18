"""PostgreSQL is set back under a pipeline, and an operator repairs it from the retained epochs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from nemesis.faults import RECOVERY_SECONDS

if TYPE_CHECKING:
    from nemesis.rig import Rig

EPOCHS: Final = 3
STOPS_SECONDS: Final = 300.0
REPAIR_SECONDS: Final = 300.0
WENT_BACK: Final = "WentBack"
SPEC: Final = "EPOCHSINK_NEMESIS_SPEC"
"""The variable that names the spec of the driver whose sinks are repaired."""


def set_back(rig: Rig) -> None:
    """Lose the primary and its synchronous standby, and promote the third server, which lacks epochs that are done.

    From then on what readers see of PostgreSQL is worth nothing. Returns when the query has stopped and says why.
    """
    primary, standby, behind = rig.cluster.roles()
    where = behind.host
    rig.timeline.tell("fault", kind="set back", where="postgres")
    where.cut(f"{where.network.subnet}.0/24")
    for _ in range(EPOCHS):
        rig.progress()
    rig.blindfold.cover({"postgres"})
    stops = rig.supervisor.deaths_of(WENT_BACK)
    for server in (primary, standby):
        server.host.kill()
    where.connect()
    behind.promote()
    rig.timeline.tell("promoted", where=where.name)
    rig.wait(lambda: rig.supervisor.deaths_of(WENT_BACK) > stops, STOPS_SECONDS, "an error that says what went back")


def repair(rig: Rig) -> int:
    """Give PostgreSQL its retained epochs again, after `set_back`; return how many it lacked.

    RuntimeError, with what the command has said, if it fails.
    """
    supervisor, cluster = rig.supervisor, rig.cluster
    supervisor.hold()
    lost, other, behind = cluster.servers
    # the primary again, with what the promoted one has: the third server is never waited for
    lost.follow(behind)
    behind.host.kill()
    lost.become_primary(RECOVERY_SECONDS)
    for server in (other, behind):
        server.follow(lost)
    applied = _type_repair(rig)
    rig.timeline.tell("healed", kind="set back", where="postgres", applied=applied)
    supervisor.go_on()
    rig.blindfold.uncover({"postgres"})
    rig.progress()
    return applied


def _type_repair(rig: Rig) -> int:
    command = ["repair", rig.cluster.checkpoint, "--sinks", "nemesis.operated:SINKS", "--yes", "--json"]
    path = os.pathsep.join(one for one in sys.path if one)
    done = subprocess.run(
        rig.supervisor.host.command([sys.executable, "-m", "epochsink.cli.app", *command]),
        env={**os.environ, "PYTHONPATH": path, SPEC: str(rig.supervisor.newest_spec)},
        capture_output=True,
        text=True,
        timeout=REPAIR_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"epochsink repair ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    found = (re.match(r"apply epoch (\d+) again", step) for step in json.loads(done.stdout)["plan"])
    return len({match[1] for match in found if match})
