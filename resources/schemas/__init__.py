"""Columns and their types, as plain values, and how they may change."""
