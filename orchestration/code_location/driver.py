"""The script that spark-submit, a service or a pod runs: the driver of a Spark application that
does an op's work.
"""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Do the work that the op's process offers (see `submission.py`)."""
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]  # this folder, whose modules have names that would hide others
    # A process that a script started in the background ignores SIGINT, which `submission.py` uses
    # to end this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from dagster_adjunct.orchestration.code_location.submission import drive

    drive()


if __name__ == "__main__":
    main()
