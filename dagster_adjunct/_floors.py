"""Checks that the three floors come from the same distribution as this package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

FLOORS = ("resources", "assets", "orchestration")


def check_floors() -> None:
    """Raise ImportError naming the folder that shadows a floor, if one does.

    A project with a folder `resources/` or `assets/` of its own in front of the path would otherwise fail
    somewhere inside, with an error about a missing name.
    """
    root = Path(__file__).resolve().parent.parent
    for name in FLOORS:
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found == root / name:
            continue
        where = found or (next(iter(spec.submodule_search_locations or []), None) if spec else None)
        problem = f"the folder {where} shadows it" if where else "it is missing"
        raise ImportError(
            f"dagster_adjunct needs its own package {name!r} from {root}, but {problem}. "
            f"Rename that folder, or put {root} before it on the path."
        )
