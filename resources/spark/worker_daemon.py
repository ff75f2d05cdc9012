"""The daemon from which Spark's Python workers are forked: Spark's own, with the imports of
Adjunct's tasks done.

A worker collects garbage after each task over everything that it has imported, which is most of the
cost of a small task. Imports here are shared by all workers and frozen, so that no collection
visits them. Spark runs this module by its name (`spark.python.daemon.module`), also on executors.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
