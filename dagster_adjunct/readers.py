"""Named readers: consumers outside of applications, whose positions in streams of the lake are
kept by name.
"""

from dagster_adjunct.resources.streams.lake.readers import NewRecords as NewRecords
from dagster_adjunct.resources.streams.lake.readers import ReaderInfo as ReaderInfo
from dagster_adjunct.resources.streams.lake.readers import list_readers as list_readers
from dagster_adjunct.resources.streams.lake.readers import read_new as read_new
from dagster_adjunct.resources.streams.lake.readers import remove_reader as remove_reader
