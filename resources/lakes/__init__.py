"""Opening a lake, wherever its metadata are: the one place that knows both objects and key-value tables."""

from dagster_adjunct.resources.lakes.open_lake import lake_in, open_lake

__all__ = ["lake_in", "open_lake"]
