"""What Spark is going to do with a batch, held against what the plan promises."""
