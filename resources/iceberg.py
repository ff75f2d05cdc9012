"""Tables in Iceberg catalogues that are configured in PyIceberg."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog


@validated
@dataclass(frozen=True, slots=True)
class IcebergTable:
    """A table in a catalogue that is configured in PyIceberg, so that this object has no secrets.

    PyIceberg is configured in `.pyiceberg.yaml` or the environment: PYICEBERG_CATALOG__<NAME>__URI
    and the like.

    An application that creates the table partitions it by `partition_by`: names of columns, or
    Iceberg's transforms of them: `days(at)`, `months(at)`, `years(at)`, `hours(at)`, `bucket(16,
    id)`, `truncate(4, code)`. Its files are at `location`, by default where the catalogue puts
    them.
    """

    identifier: str
    catalog: str = "default"
    partition_by: tuple[str, ...] = ()
    location: str | None = None

    def __post_init__(self) -> None:
        check_identifier(self.identifier)

    @property
    def name(self) -> str:
        """The name in plans: "iceberg:reference.planes", with the catalogue if it is not the
        default one.
        """
        catalog = "" if self.catalog == "default" else f"{self.catalog}:"
        return f"iceberg:{catalog}{self.identifier}"

    def open(self) -> Catalog:
        """Open the catalogue.

        Raises ConfigurationError if PyIceberg is not installed or has no catalogue of this name,
        TransientError if the catalogue does not answer.
        """
        load: Callable[[str], Catalog] = import_package(
            "Iceberg", "pyiceberg.catalog", "iceberg"
        ).load_catalog
        from pyiceberg.exceptions import NotInstalledError

        with translate_client_errors(self.catalog):
            try:
                opened = load(self.catalog)
            except (ValueError, ImportError, TypeError, NotInstalledError) as error:
                raise _catalog_error(self.catalog, error) from error
        _check_absolute(self.catalog, opened)
        return opened


def _catalog_error(name: str, error: Exception) -> errors.ConfigurationError:
    """Return the error for a catalogue that PyIceberg can't open as it is configured, or that is
    not configured.
    """
    from pyiceberg.utils.config import Config

    configured = Config().config.get("catalog", {})
    if isinstance(configured, dict) and name.lower() not in configured:
        problem = f"is not configured: configured are {', '.join(sorted(configured)) or 'none'}"
    else:
        problem = f"can't be opened: {errors.first_line(error)}"
    variables = f"PYICEBERG_CATALOG__{name.upper()}"
    return errors.ConfigurationError(
        f"the Iceberg catalogue {name!r} {problem}.",
        "Configure it for PyIceberg, in .pyiceberg.yaml or with"
        f" {variables}__TYPE, …__URI and its other settings.",
        setting=f"{variables}__URI",
    )


def _check_absolute(name: str, catalog: Catalog) -> None:
    """Raise ConfigurationError if a path in the settings of a SQL catalogue is relative: in another
    folder, it would mean another catalogue, or other files.
    """
    if type(catalog).__module__ != "pyiceberg.catalog.sql":
        return  # elsewhere a warehouse may be a name that a server resolves
    for setting in ("uri", "warehouse"):
        value = str(catalog.properties.get(setting) or "")
        if not _is_relative(value):
            continue
        raise errors.ConfigurationError(
            f"{setting!r} of the Iceberg catalogue {name!r} is {value!r}, a relative path, which"
            " means something else in each folder in which a command runs.",
            "Write it in full, in .pyiceberg.yaml or the environment: sqlite:////FOLDER/catalog.db,"
            " file:///FOLDER/warehouse.",
            setting=f"PYICEBERG_CATALOG__{name.upper()}__{setting.upper()}",
        )


def _is_relative(url: str) -> bool:
    """Return whether a URL of a SQLite database or a folder depends on the process's folder.

    False for URLs of other databases and stores, and for "".
    """
    scheme, colon, path = url.partition(":")
    if scheme.startswith("sqlite"):
        file = path.removeprefix("///")
        is_in_memory = file in ("", "//", ":memory:")
        return not is_in_memory and not file.startswith(("/", "file:"))
    if scheme == "file":  # absolute are file:///FOLDER, file://localhost/FOLDER and file:/FOLDER
        return not path.startswith(("///", "//localhost/")) and not re.match("/[^/]", path)
    return bool(url) and not colon and not url.startswith("/")


_CLIENTS = ("pyiceberg", "requests", "urllib3", "sqlalchemy", "botocore")


@contextmanager
def translate_client_errors(catalog: str) -> Iterator[None]:
    """Raise the errors of a catalogue's client, and of the libraries that it uses, as
    TransientError; others pass.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        reason = errors.first_line(error)
        raise errors.TransientError(
            f"the Iceberg catalogue {catalog!r} does not answer, or refuses a request: {reason}.",
            "See that its server runs, and that its URI and credentials are right; then run it"
            " again.",
        ) from error


def check_identifier(identifier: str) -> None:
    """Raise ConfigurationError for an identifier that is not NAMESPACE.NAME."""
    namespace, _, name = identifier.rpartition(".")
    if not name.strip() or not all(map(str.strip, namespace.split("."))):
        raise errors.ConfigurationError(
            f"{identifier!r} is no identifier of an Iceberg table: expected a namespace and a"
            " name.",
            "Write NAMESPACE.NAME, such as reference.planes.",
            table=identifier,
        )
