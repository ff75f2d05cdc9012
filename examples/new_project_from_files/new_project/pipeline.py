"""The application: it copies the records of `lake.sample-records` that have a key.

Put your own operators between the two streams: filter, with_columns, join, window and others.
"""

from dagster_adjunct import Application
from new_project.columns import KEY, SCHEMA
from new_project.deliver import PARTITIONS

# "auto" computes small batches in this process, and others by Spark, which needs Java.
app = Application("new-project", description="Records with a key", engine="auto")
records = app.input_stream("lake.sample-records")
for name in KEY:
    value = f"`{name}`" if name in SCHEMA else name  # a column, or a path such as customer.id
    records = records.filter(f"{value} is not null")
kept = app.output_stream("lake.sample-records-kept", partitions=PARTITIONS, key=KEY or None)
records.send_to(kept)
