"""Datasets rewritten into another number of partitions: the same entries, in one commit."""
