"""A process that applies one recorded epoch from the spool; tests crash it at named points.

Standard input: JSON of the sink's arguments, the identity, the epoch, its part, what is done before it, and the
spool's folder.
"""

from __future__ import annotations

import json
import sys

from elasticsearch_requests import SmallRequests

from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, Identity, LastDone
from epochsink.testing.sink_rig import OneSink


def main() -> None:
    order = json.load(sys.stdin)
    committer = OneSink.of(SmallRequests(**order["sink"]))
    identity, epoch, part = Identity(**order["identity"]), Epoch(**order["epoch"]), order["part"]
    committer.open(identity)
    rows = Spool(order["spool"]).rows(identity, epoch, part["tasks"])
    after = LastDone(**order["after"]) if order["after"] else None
    print(committer.commit(epoch, part, rows, after).outcome.value)  # noqa: T201 - the answer
    committer.close()


if __name__ == "__main__":
    main()
