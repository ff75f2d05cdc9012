"""Operators that take records one by one: other columns, fewer or more records, other partitions, several inputs."""
