"""A dataset's versions as they are stored: manifests, their log, builds, leases and holds."""
