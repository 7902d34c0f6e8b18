"""`epochsink demo`: kill a real pipeline with SIGKILL again and again, with and without epochsink, and count the rows.

    Kafka topic  ->  Spark Structured Streaming (a separate process: `pipeline`)  ->  table, index and topic

`show` runs the whole demo, `scenario` one pipeline with its kills; `destination` is a place that it writes to.
"""
