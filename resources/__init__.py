"""Access to stores: objects, streams, tables, key-value tables and Spark."""

if __name__ == "resources":
    # From the root of a checkout, its modules would be second copies of those of the package.
    raise ImportError("Import dagster_adjunct.resources in place of resources.", name=__name__)
