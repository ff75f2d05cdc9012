"""The assets of datasets and outputs, their checks, and what runs report of them."""
