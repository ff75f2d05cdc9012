"""Unbounded datasets: tables that follow a change stream, and tables that applications write."""
