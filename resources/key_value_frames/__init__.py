"""Key-value tables and Spark: read as a DataFrame, and written in bulk from one."""

from dagster_adjunct.resources.key_value_frames.read_frame import read_key_value_table
from dagster_adjunct.resources.key_value_frames.write_frame import FrameWritten, write_key_value_table

__all__ = ["FrameWritten", "read_key_value_table", "write_key_value_table"]
