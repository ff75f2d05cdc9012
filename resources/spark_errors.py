"""Adjunct's errors on their way through Spark: raised in a task or by a plan, met again where the job was started.

Spark wraps what a task raises into errors of its own, with the text of the first. So the error travels as a text
within that text, and `unwrapped` finds it there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from resources import errors
from resources.errors import AdjunctError

if TYPE_CHECKING:
    from pyspark.sql import Column

T = TypeVar("T")
_FORM = re.compile(r"adjunct-error\[([A-Za-z0-9+/=]+)\]")
_PLAIN = re.compile(r"adjunct-raised\[(\w+)\|([^\]|]*)\|(.*?)\]adjunct-raised", re.S)


def wrapped(items: Iterator[T]) -> Iterator[T]:
    """Yield the items in a Spark task; what they raise can be found again by `unwrapped`."""
    try:
        yield from items
    except AdjunctError as error:
        said = json.dumps([type(error).__name__, error.problem, error.next_step]).encode()
        raise RuntimeError(f"{error} adjunct-error[{base64.b64encode(said).decode()}]") from error


def refusal(kind: type[AdjunctError], problem: Column, next_step: str) -> Column:
    """Return a column whose evaluation fails with this error, for rows that must not be there."""
    from pyspark.sql import functions as F

    step = base64.b64encode(next_step.encode()).decode()
    text = F.concat(F.lit(f"adjunct-raised[{kind.__name__}|{step}|"), problem, F.lit("]adjunct-raised"))
    return F.raise_error(text)


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the error of Adjunct's that made a Spark job fail, instead of Spark's; others pass as they are."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found = find(str(error))
        if found is None:
            raise
        raise found from error


def first_line(error: Exception) -> str:
    """Return what an error of Spark's says first. Those of its parser begin with an empty line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def find(text: str) -> AdjunctError | None:
    """Return the error that is in the text of another one."""
    if match := _FORM.search(text):
        name, problem, next_step = json.loads(base64.b64decode(match[1]))
        return _error(name)(problem, next_step)
    if match := _PLAIN.search(text):
        return _error(match[1])(match[3], base64.b64decode(match[2]).decode())
    return None


def _error(name: str) -> Callable[[str, str], AdjunctError]:
    found: Callable[[str, str], AdjunctError] = getattr(errors, name, AdjunctError)
    return found
