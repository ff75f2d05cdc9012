"""A function of the application on its way into Spark's tasks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ShippedFunction:
    """A function as bytes, and the folders that its module may be imported from in the process that it is of."""

    pickled: bytes
    path: tuple[str, ...]

    def here(self) -> Callable[..., Any]:
        """Return the function, in the process of a task."""
        # The module that the function is in may be imported from a folder of that process only, such as a script's.
        sys.path.extend(place for place in self.path if place not in sys.path)
        function: Callable[..., Any] = pickle.loads(self.pickled)
        return function


def shipped_function(operator: str, function: Callable[..., Any]) -> ShippedFunction:
    """Return a function as it can travel; ConfigurationError where it can't."""
    from pyspark import cloudpickle

    pickling: Any = cloudpickle
    try:
        pickled = bytes(pickling.dumps(function))
    except Exception as error:  # whatever an object of somebody's says that can't be pickled
        raise ConfigurationError(
            f"{operator}: {called(function)} can't be sent to tasks: {type(error).__name__}: {error}.",
            "Have it make what it needs itself, connections and locks above all, at its first call, say.",
            argument="function",
            operator=operator,
        ) from error
    return ShippedFunction(pickled, tuple(place or str(Path.cwd()) for place in sys.path))
