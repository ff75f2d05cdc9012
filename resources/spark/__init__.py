"""The Spark session, its settings, and the translation of Spark's errors."""
