"""Opens the store of a lake whose metadata are in a key-value table, from what the lake's document says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.metadata_tables.object_addresses import BESIDE
from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.objects.documents import MetadataPlace

if TYPE_CHECKING:
    from dagster_adjunct.resources.metadata_tables.key_value_objects import KeyValueObjects
    from dagster_adjunct.resources.objects.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class MetadataInTable:
    """What opens such a store, in any process. `place` is what the lake's document says of the table, as JSON."""

    place: str

    def over(self, store: ObjectStore) -> RoutedStore:
        """Return `store` with a part of its objects in the table.

        The table is opened when it is first needed: Spark's tasks read and write data, and need neither it nor its
        driver.
        """
        place = MetadataPlace.model_validate_json(self.place)

        def table() -> KeyValueObjects:
            from dagster_adjunct.resources.metadata_tables.metadata_table import objects_in

            return objects_in(store, place)

        return RoutedStore(store, routed_keys(place), table, self)


def routed_keys(place: MetadataPlace) -> RoutedKeys:
    """Return which keys are in the table of `place`."""
    return RoutedKeys(place.below, (*place.but, BESIDE))
