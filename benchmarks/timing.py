"""How the benchmarks measure: alternating runs, medians, and the spread beside them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Measured:
    """Wall times of one thing, in seconds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        spread = f"{min(self.seconds):.2f}-{max(self.seconds):.2f}"
        return f"{self.name}: {self.median:.2f} s (median of {len(self.seconds)}: {spread})"


def alternate(rounds: int, **runs: Callable[[int], object]) -> dict[str, Measured]:
    """Run each function once a round, in turns, so that a slow moment of the machine hits all of
    them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run(number)
            seconds[name].append(time.perf_counter() - began)
    return {name: Measured(name, tuple(values)) for name, values in seconds.items()}


def module(name: str, *arguments: str | Path, **environment: str) -> None:
    """Run a module in a process of its own, start-up included; its output is shown only if it
    fails.
    """
    command = [sys.executable, "-m", name, *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}\n{done.stderr}")


def show(measured: dict[str, Measured], ratio_of: str, to: str, goal: str) -> float:
    """Print what was measured and the ratio that the goal is about; return it."""
    for item in measured.values():
        print(f"  {item}")
    ratio = measured[ratio_of].median / measured[to].median
    print(f"  {ratio_of} / {to} = {ratio:.2f} (goal: {goal})\n")
    return ratio
