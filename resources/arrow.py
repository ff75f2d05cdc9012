"""Arrow and NumPy, imported when they are first used: a code location and most commands load without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.common import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj
    import pyarrow.parquet as pq
    import pyarrow.types as pt
else:
    np = LazyModule("numpy")
    pa = LazyModule("pyarrow")
    pc = LazyModule("pyarrow.compute")
    pj = LazyModule("pyarrow.json")
    pq = LazyModule("pyarrow.parquet")
    pt = LazyModule("pyarrow.types")

__all__ = ["np", "pa", "pc", "pj", "pq", "pt"]
