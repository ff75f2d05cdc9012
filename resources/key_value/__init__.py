"""Key-value tables: families, a version per key, conditional and atomic changes, iterators (PDP-39)."""
