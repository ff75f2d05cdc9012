"""The application of the first part: see `declare.py`."""

from dagster_adjunct.examples.purchases.declare import declare_application

app = declare_application()
