"""Key-value tables: families, a version per key, conditional and atomic changes, iterators.

The design follows PDP-39 of Pravega.
"""
