"""Streams whose records lie in files that others write: folders, Iceberg and Delta tables."""
