"""How to reach things: object stores, streams, Spark, tables."""
