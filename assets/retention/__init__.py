"""Which versions and objects are kept or discarded, and the erasure of keys."""
