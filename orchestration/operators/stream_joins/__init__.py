"""Joins of two streams within a time."""
