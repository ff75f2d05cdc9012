"""Plans the next batch: what it reads, and which dataset versions it meets."""
