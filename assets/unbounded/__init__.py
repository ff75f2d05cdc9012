"""Unbounded datasets: a change stream kept as a consistent snapshot."""
