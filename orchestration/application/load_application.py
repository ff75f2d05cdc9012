"""Finds the application that MODULE:APP names."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError


def load_application(reference: str) -> Application:
    """Return the application `APP` of `MODULE`, imported with the working directory on the path."""
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{reference!r} names no application: expected MODULE:APP.",
            "For example: dagster_adjunct.examples.flights.pipeline:app.",
            argument="reference",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module_name}.".startswith(f"{error.name}.") is False:
            raise _broken(module_name, error) from error
        raise ConfigurationError(
            f"module {module_name!r} is not found (from {here}).",
            "Run from the folder that holds it.",
            module=module_name,
        ) from error
    except AdjunctError:
        raise
    except Exception as error:  # whatever a user's module does while it is imported
        raise _broken(module_name, error) from error
    application = getattr(module, attribute, None)
    if not isinstance(application, Application):
        names = sorted(name for name, value in vars(module).items() if isinstance(value, Application))
        found = f"is {type(application).__name__}, not an Application" if hasattr(module, attribute) else "is not there"
        raise ConfigurationError(
            f"{module_name}:{attribute} {found}; the module has {', '.join(names) or 'none'}.",
            "Correct the name after the colon.",
            module=module_name,
        )
    return application


def _broken(module: str, error: Exception) -> ConfigurationError:
    """Return the error that names the line of a user's code that can't be imported."""
    if isinstance(error, SyntaxError):
        where, problem = f"{error.filename}, line {error.lineno}", f"{error.msg}: {(error.text or '').strip()}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
        own = [frame for frame in theirs if Path(frame.filename).is_relative_to(Path.cwd())] or theirs
        where = f"{own[-1].filename}, line {own[-1].lineno} ({own[-1].line})" if own else module
        problem = f"{type(error).__name__}: {error}"
    missing = f"Install what {error.name!r} is of, or mend" if isinstance(error, ModuleNotFoundError) else "Mend"
    return ConfigurationError(
        f"module {module!r} can't be imported: {problem} at {where}.",
        f"{missing} the import there; ADJUNCT_DEBUG=1 shows the whole traceback.",
        module=module,
    )
