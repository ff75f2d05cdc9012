"""Partition counts: which streams need equal ones, what follows, what conflicts, and what mends that."""
