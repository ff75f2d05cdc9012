"""What users may import: the public modules, and the names in each of them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import dagster_adjunct


def public_modules() -> dict[str, ModuleType]:
    """Return the public modules by their names in an import; what is in `dagster_adjunct` itself
    comes first.
    """
    others = {
        f"dagster_adjunct.{name}": import_module(f"dagster_adjunct.{name}")
        for name in dagster_adjunct._MODULES
    }
    return {"dagster_adjunct": dagster_adjunct, **others}


def names_in(module: ModuleType) -> list[str]:
    """Return the names that users may import from a public module."""
    return list(
        getattr(module, "__all__", None)
        or (name for name in vars(module) if not name.startswith("_"))
    )


def public_names() -> dict[str, Any]:
    """Return all public names of all modules, with what they stand for."""
    return {
        name: getattr(module, name)
        for module in public_modules().values()
        for name in names_in(module)
    }
