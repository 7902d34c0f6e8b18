"""Fixtures that all tests share, each family in a plugin of its own."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("epochsink.testing.sink_contract", "epochsink.testing.sink_rig")

pytest_plugins = ["fix_tiers", "fix_services", "fix_kafka", "fix_postgres", "fix_spark"]

# a slow machine is no failure: what a test waits for has a deadline of its own
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
