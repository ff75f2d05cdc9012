"""Startpoints: requests to read partitions from another position, from the request to the commit
that applies it.

request    preview what requests would do, then write all of them or none             startpoints.py
fan out    hand requests to the tasks and datasets that they are for                  fan_out.py,
           store.py
rewind     apply requests for datasets, before the datasets advance                   coordinator.py
resolve    at the start of a run, find the offset of each and store it
           coordinator.py, positions.py
apply      with the step's next commit of offsets                                     step/step.py
take back  remove requests that are not applied yet, and stop replays                 startpoints.py
"""
