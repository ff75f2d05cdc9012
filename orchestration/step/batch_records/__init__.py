"""Which records a batch sends, refuses and leaves out."""
