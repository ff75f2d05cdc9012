"""botocore sessions that share what botocore has loaded from its descriptions of AWS services.

Parsing the descriptions takes each session a tenth of a second of processor time; with shared ones it is a hundredth.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from botocore.session import Session


def new_session(profile: str | None = None) -> Session:
    """Return a session that finds its settings and credentials as boto3 does; `profile` names an AWS profile."""
    from botocore.session import Session

    session = Session(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    from botocore.loaders import create_loader

    return create_loader(data_path)
