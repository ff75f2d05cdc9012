"""Bounded datasets: a version is built beside the one that is served, judged, sealed, and switched to."""
