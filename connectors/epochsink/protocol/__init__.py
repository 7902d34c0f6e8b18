"""The engine: two-phase commit tied to Spark's checkpoint. It knows neither Spark nor any client."""
