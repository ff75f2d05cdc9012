"""Adjunct datasets: reference data as sealed versions and followed change streams."""

if __name__ == "assets":
    # From the root of a checkout, its modules would be second copies of those of the package.
    raise ImportError("Import dagster_adjunct.assets in place of assets.", name=__name__)
