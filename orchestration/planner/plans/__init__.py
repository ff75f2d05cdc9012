"""The plan as a value, as text, as a graph and as JSON, what changed between two, and how a graph is walked."""
