"""Compiles a planned application to DataFrames for one batch, and runs its outputs."""
