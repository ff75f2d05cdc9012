"""The folder as a stream, and the application: it copies the records that have a key.

Put your own operators between the two streams: filter, with_columns, join, window and others.
"""

from dagster_adjunct import Application, file_stream
from new_project.columns import KEY, SCHEMA

FOLDER = "sample-folder"
files = file_stream("sample-records", FOLDER, format="jsonl", schema=SCHEMA, key=KEY)

# "auto" computes small batches in this process, and others by Spark, which needs Java.
app = Application("new-project", description="Records with a key", engine="auto")
records = app.input_stream(files)
for name in KEY:
    value = f"`{name}`" if name in SCHEMA else name  # a column, or a path such as customer.id
    records = records.filter(f"{value} is not null")
records.send_to(app.output_stream("lake.sample-records-kept", partitions=1, key=KEY or None))
