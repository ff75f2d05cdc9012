"""Stored versions of a dataset: manifests, their log, build records, leases and holds."""
