"""Tools to test pipelines and sinks: a sink that needs no service, and the contract for sinks of your own."""

from epochsink.testing.local_sink import LocalSink
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import SinkRig

__all__ = [
    "LocalSink",
    "SinkContract",
    "SinkRig",
]
