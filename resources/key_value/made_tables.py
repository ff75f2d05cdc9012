"""Making a table where it is missing, for whoever declares one and opens it again and again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager


def make_table(manager: KeyValueTableManager, scope: str, table: str, partitions: int) -> None:
    """See to it that a scope and a table of so many partitions are there; limits that it has got since are kept.

    Raises KeyValueTableExistsError where it has another number of partitions, or lies in another backend.
    """
    manager.create_scope(scope)
    wanted = KeyValueTableConfiguration(partitions)
    with suppress(KeyValueTableNotFoundError):
        wanted = replace(manager.get_configuration(scope, table), partitions=partitions)
    manager.create(scope, table, wanted)
