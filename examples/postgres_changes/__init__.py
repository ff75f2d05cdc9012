"""A PostgreSQL table followed from its first row on: captured by logical decoding, kept as an
unbounded dataset.
"""
