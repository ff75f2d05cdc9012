"""What assets, jobs and sensors share: the lake as a resource, metadata, errors as Dagster shows them."""
