"""Finds the kind of a store by its URL."""

from __future__ import annotations

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.objects.local_store import LocalDescriptor
from dagster_adjunct.resources.objects.store import MemoryDescriptor, S3Options, StoreDescriptor


def describe_store(url: str, s3: S3Options | None = None) -> StoreDescriptor:
    """Return the descriptor of the store at a URL: `s3://BUCKET/PREFIX`, a folder or
    `memory://NAME`.
    """
    if url.startswith("memory://"):
        return MemoryDescriptor(url, s3)
    if url.startswith("s3://"):
        from dagster_adjunct.resources.objects.s3_store import S3Descriptor

        return S3Descriptor(url, s3)
    if "://" in url:
        expected = "s3://BUCKET/PREFIX, a folder or memory://NAME"
        raise argument_error(f"store {url!r} has an unknown scheme", expected, argument="url")
    return LocalDescriptor(url, s3)
