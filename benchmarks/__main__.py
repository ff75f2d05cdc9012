"""Run all benchmarks, or some: python -m benchmarks [main-job] [datasets] [--rounds N] [--large ROWS]."""

from __future__ import annotations

import argparse

from benchmarks import datasets, main_job

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("what", nargs="*", choices=["main-job", "datasets"], help="Default: all.")
parser.add_argument("--rounds", type=int, default=3, help="Runs of each thing; medians count.")
parser.add_argument("--large", type=int, default=30_000_000, help="Rows of the large dataset; 0 leaves it out.")
chosen = parser.parse_args()
what = chosen.what or ["main-job", "datasets"]
if "main-job" in what:
    main_job.run(chosen.rounds)
if "datasets" in what:
    datasets.run(chosen.rounds, chosen.large)
