"""Imports packages that only some uses need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError


def import_package(what: str, module: str, extra: str, **about: Any) -> Any:
    """Import and return a module of an optional package, which `what` needs. Raises
    ConfigurationError without it.

    `extra` is the extra of this distribution that installs it; `about` are further fields of the
    error.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        problem = f"{what} needs the package {package}, which can't be imported here ({error})."
        step = f'Install it, on executors too: pip install "dagster-adjunct[{extra}]".'
        raise ConfigurationError(problem, step, package=package, **about) from error
