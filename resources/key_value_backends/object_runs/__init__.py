"""A segment of a key-value table in an object store: a pointer with the recent changes, and sorted runs below it."""
