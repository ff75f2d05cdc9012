"""Key-value tables: families, a version per key, conditional and atomic changes, iterators.

They follow Pravega's design proposal PDP-39, "Key-Value Tables".
"""
