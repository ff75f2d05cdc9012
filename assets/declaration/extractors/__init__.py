"""What of an input's record becomes a dataset's entry."""
