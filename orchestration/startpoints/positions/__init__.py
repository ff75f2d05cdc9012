"""Where inputs can be read from, of what their streams hold at one look."""
