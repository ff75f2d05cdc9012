"""Stores that keep some of their objects in a key-value table."""

from __future__ import annotations

from pathlib import Path

from dagster_adjunct.resources.key_value.backend_names import describe_backend
from dagster_adjunct.resources.key_value.stored_tables import new_incarnation
from dagster_adjunct.resources.key_value.table_segment import SegmentBackend, TableId
from dagster_adjunct.resources.metadata_tables.open_routed import MetadataInTable
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.objects import ObjectStore, StoreDescriptor
from dagster_adjunct.resources.objects.documents import MetadataPlace


def routed_descriptor(base: ObjectStore, backend: SegmentBackend, below: tuple[str, ...] = ("",)) -> StoreDescriptor:
    """Return a store over `base` with a new table for what begins so."""
    incarnation = new_incarnation()
    backend.create(TableId("lake", "meta", incarnation), 4)
    place = MetadataPlace(
        scope="lake",
        table="meta",
        incarnation=incarnation,
        partitions=4,
        backend=describe_backend(backend),
        below=below,
        but=(),
    )
    descriptor = base.descriptor
    return StoreDescriptor(descriptor.url, descriptor.s3, MetadataInTable(place.model_dump_json()))


def routed_store(base: ObjectStore, path: Path, below: tuple[str, ...] = ("",)) -> RoutedStore:
    """Return a store over `base` with a table in this SQLite file."""
    from dagster_adjunct.resources.key_value_backends import SqliteSegments

    path.parent.mkdir(exist_ok=True)
    store = routed_descriptor(base, SqliteSegments(path), below).open()
    assert isinstance(store, RoutedStore)
    return store
