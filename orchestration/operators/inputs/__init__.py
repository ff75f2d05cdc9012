"""Operators that records enter by."""
