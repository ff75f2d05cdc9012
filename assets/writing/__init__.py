"""Writing the sealed files of one generation."""
