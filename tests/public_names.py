"""What users may import: the public modules, and the names in each of them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import dagster_adjunct


def public_modules() -> dict[str, ModuleType]:
    """Return the public modules by their names in an import; what is in `dagster_adjunct` itself comes first."""
    others = {f"dagster_adjunct.{name}": import_module(f"dagster_adjunct.{name}") for name in dagster_adjunct._MODULES}
    return {"dagster_adjunct": dagster_adjunct, **others}


def public_names() -> dict[str, Any]:
    """Return all public names of all modules, with what they stand for."""
    return {name: getattr(module, name) for module in public_modules().values() for name in module.__all__}
