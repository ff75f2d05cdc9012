"""Modules and names that are slow to import, and are imported when they are first used.

A code location and most commands load without them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is slow to import, imported when one of its attributes is first used;
    pickled by its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_module":  # not imported yet: asked for by the last line here
            # Packages first: a thread that imports a package that imports this module, and one that
            # imports the module, would deadlock.
            for name in accumulate(self._name.split("."), "{}.{}".format):
                module = importlib.import_module(name)
            self._module = module
            return module
        return getattr(self._module, attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        return LazyModule, (self._name,)


def lazy_names(
    module: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a public module, which import each name when it is
    first used.

    `names` are the public names, by the module that defines them.
    """
    sources = {name: source for source, defined in names.items() for name in defined}

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(sources)
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(sources[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *sources})

    return __getattr__, __dir__


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

__all__ = ["F", "LazyModule", "exp", "lazy_names", "np", "pa", "pc", "pj", "pq", "pt"]
