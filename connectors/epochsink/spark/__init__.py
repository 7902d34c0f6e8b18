"""The only room that imports PySpark or py4j."""

from epochsink import arguments

arguments.require_package("ExactlyOnce", "spark", "pyspark")
