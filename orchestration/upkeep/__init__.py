"""What operators do to streams and datasets as a whole: delete, repartition, discard."""
