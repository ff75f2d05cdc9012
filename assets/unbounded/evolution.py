"""How the columns of an unbounded dataset may change without building it anew.

Rows that are there are not written again: what is added is null in them, what is widened is cast when they are read,
by Spark and by key. The next major compaction writes them in the new columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resources.errors import DatasetError
from resources.schema import widens

if TYPE_CHECKING:
    from resources.schema import Schema


def check_evolution(dataset: str, stored: Schema, declared: Schema, key: tuple[str, ...]) -> None:
    """Refuse columns that the stored rows can't be read with: only added and widened ones can, and no key's.

    Raises DatasetError with the differences.
    """
    now = {field.name: field.type for field in declared.fields}
    refused = [f"{name} ({kind}) is removed" for name, kind in _types(stored).items() if name not in now]
    for name, was in _types(stored).items():
        kind = now.get(name, was)
        if kind != was and name in key:
            refused.append(f"{name} is {kind}, was {was}, and is a column of the key, which never changes")
        elif not widens(was, kind):
            refused.append(f"{name} is {kind}, was {was}, whose values do not all fit")
    if refused:
        raise DatasetError(
            f"dataset {dataset!r} holds other columns than are declared now: {'; '.join(refused)}. Columns can only be "
            "added, or widened.",
            f"Restore these columns, or build it anew with the new ones: adjunct dataset rebuild {dataset} MODULE:APP "
            "--reason …; the old table is served until that is done.",
        )


def _types(schema: Schema) -> dict[str, str]:
    return {field.name: field.type for field in schema.fields}
