"""What an operator does to a checkpoint from outside of a query: look, recover, abort, resolve."""

from epochsink.operations.place import Place, open_place
from epochsink.operations.recovery import abort, recover
from epochsink.operations.resolution import Resolution, Ruling
from epochsink.operations.sinks import Loaded, load_sinks
from epochsink.operations.status import Status, read_status

__all__ = [
    "Loaded",
    "Place",
    "Resolution",
    "Ruling",
    "Status",
    "abort",
    "load_sinks",
    "open_place",
    "read_status",
    "recover",
]
