"""Streams: partitioned, ordered records at offsets, read in exact ranges."""
