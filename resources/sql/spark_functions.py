"""The functions of Spark 4.3 with their numbers of arguments (`spark_functions.txt`), compared by a test with Spark."""

from __future__ import annotations

from pkgutil import get_data

_LINES = (get_data(__package__, "spark_functions.txt") or b"").decode().splitlines()  # also from a zip file
_FUNCTIONS = {name: tuple(rest) for name, *rest in (line.split() for line in _LINES if not line.startswith("#"))}
SPARK_FUNCTIONS = frozenset(_FUNCTIONS)
"""The names of all functions of Spark SQL."""
AGGREGATE_FUNCTIONS = frozenset(name for name, rest in _FUNCTIONS.items() if "aggregate" in rest)
"""Functions that combine several records: aggregates, and window functions, which need `over (…)`."""
GENERATOR_FUNCTIONS = frozenset(name for name, rest in _FUNCTIONS.items() if "generator" in rest) | {
    "variant_explode", "variant_explode_outer",  # which Spark has as table functions only
}  # fmt: skip
"""Functions that return several records for one."""


def argument_count_problem(function: str, given: int | None) -> str:
    """Return "upper() takes 1 argument, and gets 2", or "" where the count is allowed or unknown."""
    allowed = _FUNCTIONS.get(function, ("?",))[0]
    if given is None or allowed == "?":
        return ""
    least, _, most = allowed.partition("-")
    if allowed.endswith("+"):
        least = allowed[:-1]
        is_allowed, allowed = given >= int(least), f"{least} or more"
    elif most:
        is_allowed, allowed = int(least) <= given <= int(most), f"{least} to {most}"
    else:
        is_allowed, allowed = str(given) in allowed.split(","), allowed.replace(",", " or ")
    return (
        "" if is_allowed else f"{function}() takes {allowed} argument{'' if allowed == '1' else 's'}, and gets {given}"
    )
