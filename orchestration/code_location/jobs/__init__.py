"""Jobs for operators: versions, compaction, Iceberg, startpoints."""
