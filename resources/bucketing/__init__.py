"""Immutable Parquet files, one per bucket: written by tasks, read as one bucketed table of
Spark.
"""
