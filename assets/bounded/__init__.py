"""Bounded datasets: a version is built next to the served one, validated, sealed, and switched
to.
"""
