"""Bounded datasets: a version is built beside the served one, validated, sealed, and switched to."""
