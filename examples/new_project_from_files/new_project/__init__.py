"""The records of the stream `sample-records`, and an application that reads them."""
