"""Finds the application that MODULE:APP names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from orchestration.application import Application
from resources.errors import ConfigurationError


def load_application(reference: str) -> Application:
    """Return the application `APP` of `MODULE`, imported with the working directory on the path."""
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{reference!r} names no application: expected MODULE:APP.",
            "For example: examples.flights.pipeline:app.",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigurationError(
            f"module {module_name!r} is not found (from {here}).", "Run from the folder that holds it."
        ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Application):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, Application))
        raise ConfigurationError(
            f"{module_name}:{attribute} is {type(found).__name__}, not an Application; the module has "
            f"{', '.join(names) or 'none'}.",
            "Correct the name after the colon.",
        )
    return found
