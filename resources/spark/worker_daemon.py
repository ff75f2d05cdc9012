"""The process that Spark's Python workers are forked from: Spark's own, with the imports of our tasks done before.

A worker collects garbage after each task, over everything that it has imported: most of what a small task costs. What
is imported here is there once for all workers, and frozen, so that no collection looks at it again.
Spark runs this module by its name (`spark.python.daemon.module`), on executors as well.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
