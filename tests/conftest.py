"""Fixtures that all tests share, each family in a plugin of its own."""

import os

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("epochsink.testing.sink_contract", "epochsink.testing.sink_rig")

# first, because it changes what the tests import
ON_OPENSEARCH = ["on_opensearch"] if os.environ.get("EPOCHSINK_TESTS_ON_OPENSEARCH") else []
pytest_plugins = [*ON_OPENSEARCH, "fix_tiers", "fix_services", "fix_tls", "fix_kafka", "fix_postgres", "fix_spark"]

# a slow machine is no failure: what a test waits for has a deadline of its own
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
