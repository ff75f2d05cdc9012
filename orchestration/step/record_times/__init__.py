"""When the records of a batch happened, and which of them are behind the watermark."""
