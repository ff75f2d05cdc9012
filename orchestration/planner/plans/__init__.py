"""The plan as a value, as text, as a graph and as JSON, and what changed between two."""
