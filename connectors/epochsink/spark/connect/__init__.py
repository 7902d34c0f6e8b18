"""The engine of Spark Connect: by PySpark's public interface and the files of the checkpoint, without a JVM."""
