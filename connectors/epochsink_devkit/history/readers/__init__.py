"""Readers for use during faults and after them; each destination's is a module, so that only its client is needed."""

from epochsink_devkit.history.readers.reader import TargetReader, TargetUnreachable

__all__ = ["TargetReader", "TargetUnreachable"]
