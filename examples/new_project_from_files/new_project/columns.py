"""The columns of the stream `sample-records`, as they were inferred from a sample of files."""

from dagster_adjunct import Schema

# KEY is a guess.
KEY = ["record_id"]
SCHEMA = Schema.of(record_id="bigint")
