"""Taking keys out of all that a dataset stores, and the proof of it."""
