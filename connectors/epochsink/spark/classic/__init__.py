"""Spark with its JVM at hand: the only room that imports py4j."""
