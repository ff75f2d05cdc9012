"""Sample data, as other systems would deliver it: `python -m orders.deliver`."""

from dagster_adjunct import LakeStreams, Schema, open_lake

STREAMS = {
    "products": (Schema.of(product="string", price="double"), "product"),
    "customers": (Schema.of(customer="string", town="string"), "customer"),
    "orders": (
        Schema.of(order_id="bigint", product="string", customer="string", quantity="int"),
        "customer",
    ),
}
PRODUCTS = [{"product": "apple", "price": 0.5}, {"product": "bread", "price": 2.0}]
CUSTOMERS = [{"customer": "ann", "town": "Leeds"}, {"customer": "bob", "town": "York"}]
ORDERS = [
    {"order_id": 1, "product": "apple", "customer": "ann", "quantity": 3},
    {"order_id": 2, "product": "bread", "customer": "bob", "quantity": 1},
    {"order_id": 3, "product": "cheese", "customer": "ann", "quantity": 2},
]


def deliver() -> None:
    """Append the sample to the streams of the lake; what is there already is not appended again."""
    streams = LakeStreams(open_lake())
    for name, (schema, key) in STREAMS.items():
        streams.create(name, schema=schema, key=[key], partitions=2)
    streams.append("products", PRODUCTS, producer="sample", sequence=1, end_of_dataset="edition-1")
    streams.append("customers", CUSTOMERS, producer="sample", sequence=1)
    streams.append("orders", ORDERS, producer="sample", sequence=1)
    print(f"{len(PRODUCTS)} products, {len(CUSTOMERS)} customers, {len(ORDERS)} orders")


if __name__ == "__main__":
    deliver()
