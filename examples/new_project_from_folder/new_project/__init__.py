"""The files of a folder as the stream `sample-records`, and an application that reads it."""
