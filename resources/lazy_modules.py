"""Modules that are slow to import, under their usual names, imported when they are first used.

A code location and most commands load without them.
"""

from __future__ import annotations

import importlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is slow to import, imported when one of its attributes is first used; pickled by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_module":
            # Packages first: two threads that import a package and a module of it, which it imports too, deadlock.
            for name in accumulate(self._name.split("."), "{}.{}".format):
                module = importlib.import_module(name)
            self._module = module
            return module
        return getattr(self._module, attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        return LazyModule, (self._name,)


if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj
    import pyarrow.parquet as pq
    import pyarrow.types as pt
    import pyspark.sql.functions as F
    import sqlglot.expressions as exp
else:
    np = LazyModule("numpy")
    pa = LazyModule("pyarrow")
    pc = LazyModule("pyarrow.compute")
    pj = LazyModule("pyarrow.json")
    pq = LazyModule("pyarrow.parquet")
    pt = LazyModule("pyarrow.types")
    F = LazyModule("pyspark.sql.functions")
    exp = LazyModule("sqlglot.expressions")

__all__ = ["F", "LazyModule", "exp", "np", "pa", "pc", "pj", "pq", "pt"]
