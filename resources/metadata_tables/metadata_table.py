"""Opens the key-value table that a lake's metadata are in, by what the lake's document says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster_adjunct.resources.key_value_backends  # noqa: F401  registers them
from dagster_adjunct.resources.key_value.backend_names import backend_from
from dagster_adjunct.resources.key_value.blocking_key_value_table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value.default_backend import backend_in
from dagster_adjunct.resources.key_value.key_value_table import KeyValueTable
from dagster_adjunct.resources.key_value.serializers import BytesSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.metadata_tables.key_value_objects import KeyValueObjects
from dagster_adjunct.resources.metadata_tables.store_clock import StoreClock
from dagster_adjunct.resources.objects.documents import MetadataPlace
from dagster_adjunct.resources.objects.lake import Lake

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_HORIZON = 30.0  # seconds for which a write is looked for whose reply was lost: leases live for two minutes
_ROOM = 2048  # of a request, for the key and what the backend adds


def objects_in(store: ObjectStore, place: MetadataPlace) -> KeyValueObjects:
    """Return the objects that are in the table of `place`; long ones are in `store`. Nothing is asked yet."""
    backend = backend_from(backend_in(Lake(store, ""), place.backend))
    backend.horizon = min(backend.horizon, _HORIZON)
    limits = [limit - _ROOM for limit in (backend.limits.value, backend.limits.request) if limit is not None]
    table = KeyValueTable(
        TableId(place.scope, place.table, place.incarnation),
        KeyValueTableConfiguration(place.partitions),
        backend,
        TextSerializer(),
        BytesSerializer(),
    )
    return KeyValueObjects(BlockingKeyValueTable(table), store, StoreClock(store), longest=min(limits, default=None))
