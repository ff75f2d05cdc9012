"""Rewriting datasets into another number of partitions, in one commit."""
