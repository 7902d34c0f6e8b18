"""Readers for use during faults and after them; each destination's is a module, so that only its client is needed."""

from epochsink.testing.readers.reader import Reader, Unreachable

__all__ = ["Reader", "Unreachable"]
