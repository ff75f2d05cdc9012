"""Streams joined with versioned reference data and written as partial updates, on Dagster and Spark.

Here is what a first application needs. The modules beside it, from `changes` to `validators`, have the rest, each name
in exactly one of them; the folders are not for users. Names are loaded when the first of them is asked for: Spark's
tasks import parts of this package, on machines that may have no Dagster, and those that need Dagster apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

_MODULES = (
    "automation",
    "changes",
    "code_location",
    "components",
    "errors",
    "exchange",
    "kafka",
    "key_value",
    "key_value_rows",
    "maintenance",
    "plans",
    "readers",
    "reading",
    "repartitioning",
    "sources",
    "startpoints",
    "streams",
    "tables",
    "testing",
    "validators",
    "windows",
)

_NAMES_FOR_DAGSTER = ("LakeResource", "SparkResource", "build_definitions")

if TYPE_CHECKING:
    from dagster_adjunct._api import *  # noqa: F403
    from dagster_adjunct._dagster_api import *  # noqa: F403
else:  # A type checker would take every name for one that is there.

    def __getattr__(name):
        import importlib

        if name in _MODULES:
            return importlib.import_module(f"dagster_adjunct.{name}")
        if name in _NAMES_FOR_DAGSTER:
            return getattr(importlib.import_module("dagster_adjunct._dagster_api"), name)
        if name == "__all__" or not name.startswith("_"):
            api = importlib.import_module("dagster_adjunct._api")
            if name == "__all__":
                return sorted([*(known for known in vars(api) if not known.startswith("_")), *_NAMES_FOR_DAGSTER])
            if hasattr(api, name):
                return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted([*globals(), *_MODULES, *__getattr__("__all__")])
