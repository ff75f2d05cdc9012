"""What was bought by country and day, as DuckDB reads it:
python -m dagster_adjunct.examples.purchases.report
"""

from __future__ import annotations

import sys

import duckdb
from pyiceberg.catalog import load_catalog

QUERY = """
    SELECT day, country, count(*) AS items, sum(amount) AS amount
    FROM purchases GROUP BY ALL ORDER BY day, country NULLS LAST
"""


def main() -> None:
    purchases = load_catalog("shop").load_table("shop.purchases").scan().to_arrow()
    database = duckdb.connect()
    database.register("purchases", purchases)
    sys.stdout.write(f"{database.sql(QUERY)}\n")


if __name__ == "__main__":
    main()
