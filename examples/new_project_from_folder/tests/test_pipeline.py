"""The application on a record, without a lake, a server or Java."""

from dagster_adjunct.testing import TestApplication, TestStream, assert_plannable
from new_project.columns import KEY, SCHEMA
from new_project.pipeline import app

STREAMS = {"files.sample-records": TestStream(SCHEMA, key=KEY)}
RECORD = {"record_id": 1}


def test_it_can_be_planned():
    assert_plannable(app, STREAMS)


def test_records_are_kept():
    with TestApplication(app, STREAMS) as test:
        test.input("files.sample-records", [RECORD])
        (kept,) = test.run().output("lake.sample-records-kept")
    assert {name: kept[name] for name in RECORD} == RECORD
