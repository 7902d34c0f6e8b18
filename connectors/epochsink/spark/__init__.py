"""The only room that imports PySpark or py4j."""
