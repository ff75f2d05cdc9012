"""The nodes of the asset graph: what each kind of them is in Dagster, and how its assets are named."""
