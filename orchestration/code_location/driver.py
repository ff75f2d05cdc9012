"""What spark-submit runs: the driver of an application that does an op's work (see submission.py)."""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the work whose folder the process of the op gives by Dagster Pipes."""
    del sys.path[0]  # this folder, whose modules have common names
    # A process that was started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from dagster_pipes import open_dagster_pipes

    from dagster_adjunct.orchestration.code_location.submission import drive

    with open_dagster_pipes() as pipes:
        drive(Path(pipes.extras["folder"]), pipes.report_custom_message)


if __name__ == "__main__":
    main()
