"""Components: a folder each."""
