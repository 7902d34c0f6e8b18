"""Fixtures that all tests share, each family in a plugin of its own."""

pytest_plugins = ["fix_services", "fix_postgres", "fix_spark"]
