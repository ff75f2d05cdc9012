"""The application on a few records, without a lake, a server or Java."""

import pytest

from dagster_adjunct.testing import TestApplication, TestStream, assert_plannable
from new_project.deliver import CUSTOMERS, ORDERS, PARTS, PRODUCTS
from new_project.pipeline import app

STREAMS = {
    "lake.orders": TestStream(ORDERS, key="customer", partitions=2),
    "lake.products": TestStream(PRODUCTS, key="product", partitions=2),
    "lake.customers": TestStream(CUSTOMERS, key="customer", partitions=2),
}


@pytest.fixture
def test():
    with TestApplication(app, STREAMS) as made:
        yield made


def test_nothing_is_shuffled():
    assert assert_plannable(app, STREAMS).exchanges == ()


def test_orders_get_price_and_town_and_are_added_up(test):
    test.dataset("products", PARTS[1]["products"])
    test.dataset("customers", PARTS[1]["customers"])
    test.input("lake.orders", PARTS[1]["orders"])
    result = test.run()
    priced = {
        row["order_id"]: (row["amount"], row["town"]) for row in result.output("lake.priced-orders")
    }
    # no edition has cheese yet
    assert priced == {1: (1.5, "Leeds"), 2: (2.0, "York"), 3: (None, "Leeds")}
    assert result.table("spending")["ann"]["spent"] == 1.5


def test_a_new_edition_and_a_change_count_from_the_next_run_on(test):
    test.dataset("products", PARTS[1]["products"])
    test.dataset("customers", PARTS[1]["customers"])
    test.input("lake.orders", PARTS[1]["orders"])
    test.run()
    test.dataset("products", PARTS[2]["products"])
    test.dataset("customers", PARTS[2]["customers"])
    test.input("lake.orders", PARTS[2]["orders"])
    result = test.run()
    priced = {
        row["order_id"]: (row["amount"], row["town"]) for row in result.output("lake.priced-orders")
    }
    assert priced == {4: (3.0, "Hull"), 5: (4.0, "Leeds")}
    assert result.table("spending")["bob"] == {"town": "Hull", "spent": 5.0}
