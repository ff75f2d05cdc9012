"""What an answer of S3 means, in Adjunct's errors, and which requests may be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
)
from botocore.exceptions import (
    ConnectionError as EndpointError,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ConfigurationError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
}
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class StoreBusyError(StoreUnavailableError):
    """The store refused without doing anything (409 among concurrent writers, throttling): repeat it."""


class UploadGoneError(StoreUnavailableError):
    """The multipart upload is not there (any more): look whether it was completed, else begin again."""


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request as errors name it: "GET of 'a/b' in s3://bucket/lake". One for several keys names the first."""

    request: str
    url: str | None = None  # of the store
    key: str | None = None
    more: int = 0  # keys beside the first

    def __str__(self) -> str:
        more = f" and {self.more} more" if self.more else ""
        return self.request if self.key is None else f"{self.request} of {self.key!r}{more} in {self.url}"


def translate(error: Exception, what: S3Request) -> AdjunctError:
    """Return the Adjunct error for a botocore error.

    `StoreBusyError` says that nothing was done; plain `StoreUnavailableError` that nobody knows.
    """
    if isinstance(error, ClientError):
        return _translate_answer(error, what)
    if isinstance(error, EndpointError | HTTPClientError | IncompleteReadError):
        return StoreUnavailableError(
            f"{what} got no answer: {_short(error)}",
            "Check the endpoint and the network, then run it again.",
            url=what.url,
            key=what.key,
        )
    if isinstance(error, BotoCoreError):
        return ConfigurationError(
            f"{what} could not be sent: {_short(error)}",
            "Check boto3's credentials, region and endpoint (AWS_PROFILE, AWS_REGION, ADJUNCT_S3_ENDPOINT, …).",
            url=what.url,
            key=what.key,
        )
    return StoreUnavailableError(f"{what} failed: {_short(error)}", "Run it again.", url=what.url, key=what.key)


def _translate_answer(error: ClientError, what: S3Request) -> AdjunctError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    answer = f"{what} was answered {status} {code}"
    if code in _THROTTLED or status == 429:
        return StoreBusyError(f"{answer}.", "Lower the request rate, then run it again.", url=what.url, key=what.key)
    if status == 409:
        return StoreBusyError(f"{answer}: concurrent writers.", "Run it again.", url=what.url, key=what.key)
    if status == 412:
        return PreconditionFailedError(f"{answer}.", "Read the object again and decide again.", key=what.key)
    if code == "NoSuchBucket":
        return ConfigurationError(
            f"{answer}: the bucket does not exist.", "Create it, or correct the URL.", url=what.url
        )
    if code == "NoSuchUpload":
        return UploadGoneError(f"{answer}.", "Run it again.", url=what.url, key=what.key)
    if status == 404:
        return ObjectNotFoundError(f"{answer}.", "Check the URL, and whether the object was deleted.", key=what.key)
    if status == 501 or code == "NotImplemented":
        return ConditionalWritesUnsupportedError(
            f"{answer}: the store lacks it.",
            "Use a store that has conditional writes, or upgrade this one.",
            url=what.url,
        )
    if status in (401, 403):
        return ConfigurationError(
            f"{answer}: these credentials may not do it.",
            "Check the credentials, the bucket's policy and the clock.",
            url=what.url,
            key=what.key,
        )
    if status >= 500 or status == 0 or code in ("RequestTimeout", "RequestTimeTooSkewed"):
        return StoreUnavailableError(f"{answer}.", "Run it again.", url=what.url, key=what.key)
    message = str(error.response.get("Error", {}).get("Message", ""))
    return ConfigurationError(
        f"{answer}: {message}", "Check the URL and the ADJUNCT_S3_… settings.", url=what.url, key=what.key
    )


def ends_before(error: ClientError) -> bool:
    """Whether a ranged GET failed because the object ends before the range."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416


def asking(what: S3Request, request: Callable[[], T]) -> T:
    """Send one request and return its result, or raise what the answer means."""
    try:
        return request()
    except (ClientError, BotoCoreError) as error:
        raise translate(error, what) from error


def repeated(request: Callable[[], T], attempts: int, on: type[StoreUnavailableError] = StoreUnavailableError) -> T:
    """Call `request` until it does not raise `on`, at most `attempts` times, with growing random pauses."""
    return Retrying(
        retry=retry_if_exception_type(on),
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        reraise=True,
    )(request)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
