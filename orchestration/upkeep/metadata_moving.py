"""Moves what is small and contended in a lake into a key-value table, and back: batch logs, run leases, startpoints,
budgets, recorded answers.

What one swap of the lake's document says holds: before it the metadata are among the lake's objects, after it in the
table. Whoever dies on the way is repeated, or taken back with `move_metadata_back`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.known_applications import list_applications
from dagster_adjunct.orchestration.batchlog.run_lease import who_runs
from dagster_adjunct.resources.errors import ApplicationBusyError, ConfigurationError
from dagster_adjunct.resources.key_value.stored_tables import StoredTable, TableState, parsed
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_manager import NAMESPACE, KeyValueTableManager
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.metadata_tables.key_value_objects import LONG_OBJECTS
from dagster_adjunct.resources.metadata_tables.metadata_table import objects_in
from dagster_adjunct.resources.metadata_tables.move_objects import (
    claim_table,
    copy_back,
    copy_into,
    fence_all,
    left_behind,
    release_all,
    strays,
)
from dagster_adjunct.resources.metadata_tables.open_routed import routed_keys
from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.objects.documents import MetadataPlace
from dagster_adjunct.resources.objects.lake_document import read_lake_document, store_metadata_place

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.object_store import ObjectStore

BELOW = ("applications/", "metadata/")
"""What is moved: all that is swapped often, and by several. What protects data (leases of versions, holds, the pointers
of streams and datasets) stays beside the data, which can be read without the table."""
BUT = (f"metadata/{NAMESPACE}/",)
"""What leads to the table can't be in it."""
_GRACE = timedelta(hours=1)
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MetadataMove:
    """What a move did: whether the lake's document was swapped (it may have been so before), and what was copied.

    `strays` are pointers at which somebody has committed in the object store all the same: somebody who had opened the
    lake before.
    """

    table: str
    moved: bool
    objects: int
    back: bool = False
    strays: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the report in one line."""
        to = "the lake's objects" if self.back else f"the key-value table {self.table}"
        if not self.moved:
            return f"metadata are in {to} already"
        moved = f"metadata moved to {to}: {self.objects:,} objects"
        if self.back or not self.objects:
            return moved
        return f"{moved}; those in the object store stay until adjunct metadata collect"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def move_metadata(
    lake: Lake, scope: str, table: str, *, backend: SegmentBackend | None = None, partitions: int = 4
) -> MetadataMove:
    """Keep the lake's metadata in this key-value table from now on, which is made where it is not there.

    Nobody may be running an application (ApplicationBusyError), and every process that has the lake open is to be
    started again: what it writes is refused (MetadataMovedError). Safe to repeat. Raises ConfigurationError where they
    are in another table, and where this one holds anything else.
    """
    store = lake.store.objects if isinstance(lake.store, RoutedStore) else lake.store
    manager = KeyValueTableManager(lake, backend)
    manager.create_scope(scope)
    document = read_lake_document(store)
    assert document is not None  # the scope has made the lake
    named = f"{scope}/{table}"
    if document.metadata is not None:
        declared = document.metadata
        if (declared.scope, declared.table) != (scope, table):
            raise ConfigurationError(
                f"the metadata of {lake.url} are in {declared.words()}; expected among its objects.",
                "Move them back first: adjunct metadata move --back.",
                url=lake.url,
            )
        return MetadataMove(named, False, 0, strays=tuple(strays(store, routed_keys(declared))))
    _check_idle(lake)
    found_table = _stored(lake, named)
    if found_table is None or found_table.state is TableState.CREATING:
        manager.create(
            scope, table, found_table.configuration if found_table else KeyValueTableConfiguration(partitions)
        )
        found_table = _stored(lake, named)
    assert found_table is not None
    if found_table.state is not TableState.ACTIVE:
        raise ConfigurationError(
            f"the key-value table {named} is {found_table.state.value}: expected one that can be written.",
            "Name a table that does not exist yet.",
            table=named,
        )
    place = MetadataPlace(
        scope=scope,
        table=table,
        incarnation=found_table.incarnation,
        partitions=found_table.partitions,
        backend=found_table.backend,
        below=BELOW,
        but=BUT,
    )
    routed, objects = routed_keys(place), objects_in(store, place)
    claim_table(objects, document.id, place.words())
    for _ in range(_ROUNDS):
        fence_all(store, routed, place.words())
        try:
            _check_idle(lake)  # one that began before it could not
        except ApplicationBusyError:
            release_all(store, routed)
            raise
        copied = copy_into(objects, store, routed, place.words(), partial(_are_in, store, place))
        if not strays(store, routed):  # of an application that is new since, or of a move that was taken back
            break
    store_metadata_place(store, None, place)
    objects.close()
    return MetadataMove(named, True, copied, strays=tuple(strays(store, routed)))


def move_metadata_back(lake: Lake) -> MetadataMove:
    """Keep the lake's metadata among its objects again. The table is sealed and stays; safe to repeat.

    Where a move into a table has been interrupted, it is taken back. Raises as `move_metadata` does.
    """
    store = lake.store.objects if isinstance(lake.store, RoutedStore) else lake.store
    document = read_lake_document(store)
    place = None if document is None else document.metadata
    if place is None:
        released = release_all(store, RoutedKeys(BELOW, BUT))
        return MetadataMove("", bool(released), released, back=True)
    _check_idle(lake)
    KeyValueTableManager(lake).seal(place.scope, place.table, with_metadata=True)
    objects = objects_in(store, place)
    copied = copy_back(store, objects, routed_keys(place), partial(_are_in, store, place))
    store_metadata_place(store, place, None)
    objects.close()
    return MetadataMove(f"{place.scope}/{place.table}", True, copied, back=True)


def collect_metadata(lake: Lake, *, dry_run: bool = False) -> int:
    """Delete what the lake's object store has of metadata that are in a table; return how many objects that are.

    These are what was there when they were moved, and parts of the table's own that nothing has referred to for an
    hour. Does nothing where they are not in a table.
    """
    store = lake.store
    if not isinstance(store, RoutedStore):
        return 0
    long = store.objects.list(LONG_OBJECTS)
    # Before the look at what is in use: what is written after it is young.
    old = [item.key for item in long if item.modified < lake.now() - _GRACE]
    used = store.table.long_objects() if old else set()
    garbage = [*left_behind(store.objects, store.routed), *(key for key in old if key not in used)]
    if not dry_run:
        store.objects.delete_many(garbage)
    return len(garbage)


def _stored(lake: Lake, named: str) -> StoredTable | None:
    entry = MetadataStore(lake).namespace(NAMESPACE, "all").read().get(named)
    return None if entry is None else parsed(StoredTable, entry, f"key-value table {named}")


def _are_in(store: ObjectStore, place: MetadataPlace) -> bool:
    document = read_lake_document(store)
    return document is not None and document.metadata == place


def _check_idle(lake: Lake) -> None:
    for application in list_applications(lake):
        if runner := who_runs(lake, application):
            raise ApplicationBusyError(
                f"application {application!r} is being run by {runner}: metadata are moved while nobody runs.",
                "Wait for its end, or stop it.",
                application=application,
            )
