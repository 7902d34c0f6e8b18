"""OpenSearch sinks whose requests are so small that an epoch of a few rows takes several."""

from __future__ import annotations

from epochsink.opensearch import OpenSearch


class SmallRequests(OpenSearch):
    """A sink with four or five documents in a request."""

    bulk_bytes = 500
