"""The lake's own streams: sealed segments under an index, committed by one pointer."""
