"""botocore sessions that ask for credentials again after a service has called them expired, and
share its descriptions.

Parsing botocore's descriptions of AWS services takes each session a tenth of a second of processor
time; with shared ones it is a hundredth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from botocore.credentials import Credentials
    from botocore.loaders import Loader
    from botocore.session import Session

_CLOCK_CODES = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
# Answers to credentials that were valid before, or to a clock that is wrong: the same request may
# succeed later.
STALE_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "RequestExpired",
        *_CLOCK_CODES,
        "CredentialsExpired",
        "IDPCommunicationError",  # of STS: the provider of web identities did not answer
    }
)
# Answers to a wrong secret, and to a clock that is wrong.
_SIGNATURE_CODES = frozenset({"SignatureDoesNotMatch", "InvalidSignatureException", "AuthFailure"})
_MOST_SKEW = timedelta(minutes=4, seconds=30)  # services accept a difference of 5 or 15 minutes
# Errors of a provider that may have credentials later: a process, a role, a machine, a login by
# SSO.
_PROVIDER_ERRORS = (
    "CredentialRetrievalError",
    "MetadataRetrievalError",
    "TokenRetrievalError",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "LoginRefreshRequired",
    "LoginTokenLoadError",
)


class RenewableCredentials:
    """Credentials as botocore uses them, loaded again after `renew`.

    botocore itself renews only those whose provider states when they expire.
    """

    def __init__(self, load: Callable[[], Credentials | None]) -> None:
        self._load = load
        self._loaded: Credentials | None = None

    def renew(self) -> None:
        """Let the next request load the credentials from their provider again."""
        self._loaded = None

    def load_credentials(self) -> RenewableCredentials:
        """Load the credentials and return this object; a botocore session calls it as its chain
        of providers.
        """
        self._loaded = self._load()
        return self

    def get_frozen_credentials(self) -> Any:
        """Return the credentials to sign a request with. Raises botocore's errors if there are
        none now.
        """
        from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

        if self._loaded is None:
            self._loaded = self._load()
        if self._loaded is None:
            raise NoCredentialsError
        try:
            return self._loaded.get_frozen_credentials()
        except RuntimeError as error:  # a provider has just given credentials that have expired
            self.renew()
            raise CredentialRetrievalError(provider=self.method, error_msg=str(error)) from error

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        return lambda: getattr(self.get_frozen_credentials(), name, None)

    @property
    def method(self) -> str:
        """How botocore has found the credentials, such as "custom-process"."""
        if self._loaded is None:
            return "unknown"
        return str(self._loaded.method)

    @property
    def access_key(self) -> str:
        return str(self.get_frozen_credentials().access_key)

    @property
    def secret_key(self) -> str:
        return str(self.get_frozen_credentials().secret_key)

    @property
    def token(self) -> str | None:
        token: str | None = self.get_frozen_credentials().token
        return token

    @property
    def account_id(self) -> str | None:
        account: str | None = self.get_frozen_credentials().account_id
        return account


def new_session(
    profile: str | None = None, load: Callable[[], Credentials] | None = None
) -> Session:
    """Return a session that finds its settings and credentials as boto3 does; `profile` names an
    AWS profile.

    Once a service has called the credentials expired, the next request asks their provider again: a
    file, a process, a role, or `load`, if it is given.
    """
    session = _plain_session(profile)
    # The session's own chain is used once: later, files may have changed since it has read them.
    unused = [session.get_component("credential_provider")]

    def find() -> Credentials | None:
        if unused:
            chain = unused.pop()
        else:
            chain = _plain_session(profile).get_component("credential_provider")
        found: Credentials | None = chain.load_credentials()
        return found

    credentials = RenewableCredentials(load or find)
    session.register_component("credential_provider", credentials)
    session.register("after-call", partial(_renew_if_stale, credentials))
    return session


def _plain_session(profile: str | None) -> Session:
    """Return a session of botocore that shares the descriptions of services."""
    from botocore.session import Session

    session = Session(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


def _renew_if_stale(
    credentials: RenewableCredentials, parsed: Mapping[str, Any], **event: Any
) -> None:
    """Renew the credentials after an answer that may be due to them; called with each answer."""
    code = (parsed.get("Error") or {}).get("Code", "")
    if code in STALE_CODES or code in _SIGNATURE_CODES:
        credentials.renew()


@cache
def _loader(data_path: str | None) -> Loader:
    """Return the loader of descriptions of services, one for all sessions."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


class StaleReason(NamedTuple):
    """Why credentials are refused now but may be accepted later, and the next step; "" and "" for
    an error of another kind.
    """

    reason: str
    next_step: str


_NOT_STALE = StaleReason("", "")


def stale_reason(error: BaseException) -> StaleReason:
    """Return why an error of botocore may pass: credentials have expired, their provider fails, or
    this machine's clock is wrong.
    """
    if any(kind.__name__ in _PROVIDER_ERRORS for kind in type(error).__mro__):
        step = (
            "Check the provider of the credentials (a process, a role, a login by SSO), then run it"
            " again."
        )
        return StaleReason("the provider of the credentials has none now", step)
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return _NOT_STALE
    code = str(response.get("Error", {}).get("Code", ""))
    skew = clock_skew(response)
    is_skewed = skew is not None and abs(skew) > _MOST_SKEW
    is_due_to_skew = code in _SIGNATURE_CODES and is_skewed
    if code in _CLOCK_CODES or is_due_to_skew:
        apart = ""
        if skew is not None:
            apart = f": the service's is {skew.total_seconds():+,.0f} s from it"
        return StaleReason(
            f"this machine's clock is wrong{apart}",
            "Let it follow a time server, then run it again.",
        )
    if code not in STALE_CODES:
        return _NOT_STALE
    step = (
        "Run it again: it asks the provider of the credentials (a file, a process, a role) again."
        " Renew those that do not renew themselves."
    )
    return StaleReason("the credentials have expired", step)


def clock_skew(response: Mapping[str, Any]) -> timedelta | None:
    """Return how far the clock of the service that answered is ahead of this machine's; None if
    it states no time.
    """
    stated = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        moment = parsedate_to_datetime(stated)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment - utc_now()
