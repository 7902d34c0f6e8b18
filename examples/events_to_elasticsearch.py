"""Events to Elasticsearch, an index for each tenant; what no index can be made for is kept as a dead letter.

    INPUT=/data/events ELASTICSEARCH=http://localhost:9200 CHECKPOINT=/tmp/events python events_to_elasticsearch.py

Each line is {"tenant": "acme", "event_id": 7, "text": "paid"}. Names of indices are lower case: an event of tenant
"ACME" is refused, and the others of its epoch are not held up.
"""

import os

from pyspark.sql import SparkSession

from epochsink import Elasticsearch, ExactlyOnce

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "events": Elasticsearch(
            os.environ["ELASTICSEARCH"],
            index_by="concat('events-', tenant)",
            key=["tenant", "event_id"],
            on_rejected="dead_letter",
            dead_letter_index="rejected-events",
        )
    },
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("events").getOrCreate()
    events = spark.readStream.schema("tenant STRING, event_id BIGINT, text STRING").json(os.environ["INPUT"])
    sink.start(events.writeStream.trigger(availableNow=True)).awaitTermination()
