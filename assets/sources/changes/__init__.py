"""Change formats: what the records of a change stream say of which entry."""
