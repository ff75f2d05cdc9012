"""The application on a record, without a lake, a server or Java."""

from dagster_adjunct.testing import TestApplication, TestStream, assert_plannable
from new_project.columns import KEY, SCHEMA
from new_project.deliver import PARTITIONS
from new_project.pipeline import app

STREAMS = {"lake.sample-records": TestStream(SCHEMA, key=KEY, partitions=PARTITIONS)}
RECORD = {"record_id": 1}


def test_it_can_be_planned():
    assert_plannable(app, STREAMS)


def test_records_are_kept():
    with TestApplication(app, STREAMS) as test:
        test.input("lake.sample-records", [RECORD])
        (kept,) = test.run().output("lake.sample-records-kept")
    assert {name: kept[name] for name in RECORD} == RECORD
