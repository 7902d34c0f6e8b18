"""Development tools beside the library: services to test against, the demo, the report's page, and the history checker.

Nothing that runs in production imports this package.
"""
