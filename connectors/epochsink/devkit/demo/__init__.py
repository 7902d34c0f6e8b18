"""`epochsink demo`: a real pipeline is killed -9 again and again, with and without epochsink, and rows are counted.

    Kafka topic  ->  Spark Structured Streaming (a process of its own: `pipeline`)  ->  table, index and topic

`show` is the whole demo, `scenario` one pipeline with its kills, `destination` a place that it writes to.
"""
