"""The application of `pipeline.py` once the catalogue calls the names of products titles.

The stream `lake.sold` follows, and its column `channel` is dropped. What was stored before is read
under the new names.
"""

from __future__ import annotations

from dagster_adjunct.examples.orders.pipeline import declare_application, declare_catalogue

RENAMED = {"name": "title"}

catalogue = declare_catalogue("title", renamed=RENAMED)
app = declare_application(
    catalogue,
    ["order", "at", "sku", "title", "category", "amount", "city", "is_new"],
    renamed=RENAMED,
    drop=["channel"],
)
