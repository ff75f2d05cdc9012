"""What a stream system is: partitions, offsets, ranges, startpoints; nothing of any one system."""
