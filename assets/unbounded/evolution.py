"""How the columns of an unbounded dataset may change without building it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resources.errors import DatasetError

if TYPE_CHECKING:
    from resources.schema import Schema


def check_evolution(dataset: str, stored: Schema, declared: Schema, key: tuple[str, ...]) -> None:
    """Refuse columns that the stored rows can't be read with: only added and widened ones can."""
    if stored != declared:
        raise DatasetError(
            f"dataset {dataset!r} holds other columns than are declared now: {stored.difference(declared)}. That "
            "needs a rebuild.",
            "Declare it under a new name, which builds it afresh beside the old one, or restore the old columns.",
        )
