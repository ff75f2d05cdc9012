"""Sealed Parquet files, one a bucket: written by tasks, read back as one bucketed table."""
