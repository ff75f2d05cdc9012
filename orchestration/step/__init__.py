"""Running an application: advances its datasets, then runs its step, which is batch after batch
of its operators.
"""
