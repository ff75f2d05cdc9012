"""Creates the stream `sample-records`: `python -m new_project.deliver`; an existing one stays.

`adjunct stream append sample-records FILE...` appends files to it, each file once.
"""

from dagster_adjunct import LakeStreams, open_lake
from new_project.columns import KEY, SCHEMA

# Records of a key are in one partition; without a key there is only one.
PARTITIONS = 2 if KEY else 1


def create() -> None:
    """Create the stream in the lake, or add columns that are new in SCHEMA."""
    streams = LakeStreams(open_lake())
    streams.create("sample-records", schema=SCHEMA, key=KEY, partitions=PARTITIONS)
    print(f"lake.sample-records: {len(SCHEMA.names)} columns, {PARTITIONS} partitions")


if __name__ == "__main__":
    create()
