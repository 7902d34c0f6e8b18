"""Elasticsearch sinks whose requests are so small that an epoch of a few rows takes several."""

from __future__ import annotations

import os
from importlib import import_module

if os.environ.get("EPOCHSINK_TESTS_ON_OPENSEARCH"):
    import_module("on_opensearch")

from epochsink.elasticsearch import Elasticsearch


class SmallRequests(Elasticsearch):
    """A sink with four or five documents in a request."""

    bulk_bytes = 500


class OneByOne(SmallRequests):
    """A sink that sends the next request when the one before is answered."""

    per_node = 1
