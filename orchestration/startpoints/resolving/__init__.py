"""Offsets and versions for requests: looked up in streams, or as a recorded plan has them."""
