"""Names of environment variables, as declarations have them in the place of secrets."""

from __future__ import annotations

import re

from dagster_adjunct.resources.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variable_name(argument: str, given: object, example: str = '"MY_VARIABLE"', *, label: str = "") -> str:
    """Return the name of an environment variable; what is none is refused, not shown: it may be the secret."""
    if isinstance(given, str) and _NAME.fullmatch(given):
        return given
    raise ConfigurationError(
        f"{label}{': ' if label else ''}{argument} is no name of an environment variable.",
        f"Put the value into one and give its name: {argument}={example}.",
        argument=argument,
    )
