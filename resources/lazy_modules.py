"""Modules and names that are slow to import, and are imported when they are first used.

A code location and most commands load without them.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is slow to import, imported when one of its attributes is first used;
    pickled by its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_module":
            # Packages first: a thread that imports a package that imports this module, and one that
            # imports the module, would deadlock.
            for name in accumulate(self._name.split("."), "{}.{}".format):
                module = importlib.import_module(name)
            self._module = module
            return module
        return getattr(self._module, attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        return LazyModule, (self._name,)


def lazy_names(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a public module, which import each name when it is
    first used.

    The names are those that the module's source `file` imports in its `if TYPE_CHECKING:` block,
    which type checkers read.
    """

    @cache
    def sources() -> dict[str, str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(sources())
        if name.startswith("_") or name not in sources():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        collects = gc.isenabled()
        # imports leave no garbage; looking for it, in all of Dagster too, takes a sixth of the time
        gc.disable()
        try:
            value = getattr(importlib.import_module(sources()[name]), name)
        finally:
            if collects:
                gc.enable()
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__, lambda: sorted({*vars(sys.modules[module]), *sources()})


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
