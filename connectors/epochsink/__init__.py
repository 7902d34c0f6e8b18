"""Exactly-once sinks for PySpark Structured Streaming."""
