"""Where reading starts: requested by people, handed to tasks, resolved, applied by a commit of offsets.

ask        what requests would do is looked at; then all are written, or none       application_startpoints.py
hand out   requests become what each task, and each dataset, has to apply           fan_out_coordinator.py
rewind     of datasets: theirs are applied before they advance                      dataset_requests.py
resolve    at the start of a run each gets its offset, every partition a position   start_of_run.py
apply      with the commit of offsets that the step makes                           step/commit/commit_offsets.py
take back  what is not applied yet, and replays that are under way                  take_back_startpoints.py
"""
