"""What runs when: applications, their plan and step, and how Dagster runs them."""

if __name__ == "orchestration":
    # From the root of a checkout, its modules would be second copies of those of the package.
    raise ImportError(
        "Import dagster_adjunct.orchestration in place of orchestration.", name=__name__
    )
