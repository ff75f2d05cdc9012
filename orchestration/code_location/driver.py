"""What spark-submit, a service or a pod starts: the driver of an application that does an op's work (submission.py)."""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the work that the process of the op offers, as Dagster Pipes describes."""
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]  # this folder, whose modules have common names
    # A process that was started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from dagster_adjunct.orchestration.code_location.submission import drive

    drive()


if __name__ == "__main__":
    main()
