"""Brings datasets of either kind up to date with their input."""
