"""What was bought by country and day, by DuckDB: python -m dagster_adjunct.examples.purchases.report"""

from __future__ import annotations

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
    print(database.sql(QUERY))


if __name__ == "__main__":
    main()
