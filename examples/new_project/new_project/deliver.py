"""Sample data, as other systems would deliver it: `python -m new_project.deliver 1`, and later
2.
"""

import sys

from dagster_adjunct import LakeStreams, Schema, open_lake

ORDERS = Schema.of(order_id="bigint", product="string", customer="string", quantity="int")
PRODUCTS = Schema.of(product="string", price="double")
CUSTOMERS = Schema.of(customer="string", town="string")

PARTS = {
    1: {
        "products": [{"product": "apple", "price": 0.5}, {"product": "bread", "price": 2.0}],
        "customers": [{"customer": "ann", "town": "Leeds"}, {"customer": "bob", "town": "York"}],
        "orders": [
            {"order_id": 1, "product": "apple", "customer": "ann", "quantity": 3},
            {"order_id": 2, "product": "bread", "customer": "bob", "quantity": 1},
            {"order_id": 3, "product": "cheese", "customer": "ann", "quantity": 2},
        ],
    },
    2: {
        "products": [{"product": "apple", "price": 0.75}, {"product": "cheese", "price": 4.0}],
        "customers": [{"customer": "bob", "town": "Hull"}],
        "orders": [
            {"order_id": 4, "product": "apple", "customer": "bob", "quantity": 4},
            {"order_id": 5, "product": "cheese", "customer": "ann", "quantity": 1},
        ],
    },
}


def deliver(part: int) -> None:
    """Append a part to the streams of the lake; a part that is there already adds nothing."""
    streams = LakeStreams(open_lake())
    streams.create("orders", schema=ORDERS, key=["customer"], partitions=2)
    streams.create("products", schema=PRODUCTS, key=["product"], partitions=2)
    streams.create("customers", schema=CUSTOMERS, key=["customer"], partitions=2)
    rows = PARTS[part]
    # The marker says that this edition is whole.
    edition = f"edition-{part}"
    streams.append(
        "products", rows["products"], producer="sample", sequence=part, end_of_dataset=edition
    )
    streams.append("customers", rows["customers"], producer="sample", sequence=part)
    streams.append("orders", rows["orders"], producer="sample", sequence=part)
    print(f"part {part}: {len(rows['products'])} products, {len(rows['orders'])} orders")


if __name__ == "__main__":
    deliver(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
