"""Clients of DynamoDB, and the translation of their errors into problems of entries."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.aws import new_session, stale_reason
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.store import check_variable_name, read_variable
from dagster_adjunct.resources.tables.functions import RUN_FENCE
from dagster_adjunct.resources.tables.operation import Problem, State, first_cause

if TYPE_CHECKING:
    from botocore.credentials import Credentials
    from botocore.exceptions import ClientError
    from botocore.session import Session
    from mypy_boto3_dynamodb import DynamoDBClient

_STALE_SECONDS = 1.0  # the pause before credentials are asked for again
THROTTLED_SECONDS = 0.1  # the pause if DynamoDB throttles a request without asking for one
_THROTTLED = {
    "ProvisionedThroughputExceededException",
    "ThrottlingException",
    "Throttling",
    "RequestLimitExceeded",
    "LimitExceededException",
    "TooManyRequestsException",
    "SlowDown",
}
_NO_EFFECT = {
    "TransactionConflictException",
    "TransactionInProgressException",
    "ReplicatedWriteConflictException",
}
_NO_ACCESS = {
    "ResourceNotFoundException",
    "AccessDeniedException",
    "AccessDenied",
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "MissingAuthenticationToken",
    "IncompleteSignatureException",
}
_OF_THE_ENTRY = {"ValidationException", "ItemCollectionSizeLimitExceededException"}
# Messages of a ValidationException which concern every entry: the table was replaced by one with
# another key.
_OTHER_KEY = re.compile(
    "required keys was not given|[Mm]issing the key|mismatch for key|does not match the schema"
)
_ENDPOINT = re.compile(r"https?://[^@/?#]+/?")


@dataclass(frozen=True, slots=True)
class Connection:
    """How to connect to DynamoDB, without secrets; boto3 finds what is None.

    `credentials_env` names the environment variables with the access key's id, the secret and
    optionally the session token; they are read when connecting. `session` is a boto3 session of the
    caller's, for this process only.
    """

    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None
    credentials_env: tuple[str, ...] | None = None
    connect_timeout: float = 3.0
    read_timeout: float = 15.0
    session: Any = field(default=None, repr=False)

    def check(self, label: str) -> None:
        """Raise ConfigurationError for invalid attributes, and for those that may contain a
        secret.
        """
        if self.endpoint_url is not None and not _ENDPOINT.fullmatch(self.endpoint_url):
            problem = (
                f"{label}: endpoint_url is not a server's URL (not shown, as it may hold"
                " credentials)."
            )
            step = (
                "Use a URL like http://127.0.0.1:8000 without credentials, which boto3 finds"
                " itself."
            )
            raise errors.ConfigurationError(problem, step, argument="endpoint_url")
        named = self.credentials_env
        has_names = all(isinstance(name, str) and name for name in named or ())
        if named is not None and not (len(named) in (2, 3) and has_names):
            raise errors.ConfigurationError(
                f"{label}: credentials_env has {len(named)} names; expected two, or three with a"
                " session token.",
                'Pass credentials_env=("MY_KEY_ID", "MY_SECRET").',
                argument="credentials_env",
            )
        for name in named or ():
            check_variable_name("credentials_env", name, '("MY_KEY_ID", "MY_SECRET")', label=label)
        if self.session is not None and (named is not None or self.profile is not None):
            raise errors.ConfigurationError(
                f"{label}: it has both a session and credentials.",
                "Pass one of them.",
                argument="session",
            )

    def client(self, label: str, threads: int) -> DynamoDBClient:
        """Return a client that this many threads can use at a time; it does not retry by itself.
        Raises ConfigurationError if boto3 can't create one.
        """
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=self.connect_timeout,
            read_timeout=self.read_timeout,
            max_pool_connections=threads,
            # requests are built here; validating each value again costs a third
            parameter_validation=False,
            tcp_keepalive=True,
            # Given, because boto3 would compute it for each request, which is a tenth of the
            # request's cost.
            user_agent=f"dagster-adjunct Boto3/{boto3.__version__}",
        )
        if self.session is None:
            create = self._new_session(label).create_client
        else:
            create = self.session.client
        try:
            client = create(
                "dynamodb", region_name=self.region, endpoint_url=self.endpoint_url, config=config
            )
        except (BotoCoreError, ValueError) as error:
            raise _client_error(label, error) from error
        client.meta.events.register("before-send.dynamodb", _check_before_body)
        return cast("DynamoDBClient", client)

    def with_session(self, label: str) -> Connection:
        """Return the same connection with a session, which has the credentials and which all its
        clients share.

        Two threads must not create clients of it at the same time.
        """
        import boto3

        if self.session is not None:
            return self
        return replace(
            self, session=boto3.session.Session(botocore_session=self._new_session(label))
        )

    def _new_session(self, label: str) -> Session:
        """Return a session of botocore with the credentials of this connection; ConfigurationError
        if there can't be one.
        """
        from botocore.exceptions import BotoCoreError

        try:
            if self.credentials_env is None:
                return new_session(self.profile)
            return new_session(self.profile, partial(self._credentials, label))
        except (BotoCoreError, ValueError) as error:
            raise _client_error(label, error) from error

    def _credentials(self, label: str) -> Credentials:
        """Return the credentials that environment variables hold now."""
        from botocore.credentials import Credentials

        words = ("access_key", "secret_key", "token")
        named = zip(words, self.credentials_env or (), strict=False)
        values = {word: read_variable(label, name, word.replace("_", " ")) for word, name in named}
        return Credentials(**values, method="env")


@contextmanager
def checked_sends(fence: Fence | None) -> Iterator[None]:
    """Check the fence before each request of this thread in the `with` block: now, and once more
    when the connection is there, whose making may have been paused.

    Raises RunLeaseLostError if the run may have lost its lease; then nothing took effect.
    """
    if fence is None:
        yield
        return
    fence.check()
    token = RUN_FENCE.set(fence)
    try:
        yield
    except Exception as error:
        lost = first_cause(error, errors.RunLeaseLostError)  # boto3 raises an error of its own
        if lost is not None:
            raise lost from None
        raise
    finally:
        RUN_FENCE.reset(token)


class _CheckedBody(io.BytesIO):
    """The body of a request, which is read when its headers were sent: without it, the request
    has no effect.
    """

    def __init__(self, body: bytes, fence: Fence) -> None:
        super().__init__(body)
        self._fence = fence

    def read(self, size: int | None = -1, /) -> bytes:
        rest = super().read()
        if rest:
            self._fence.check()
        return rest


def _check_before_body(request: Any, **_: object) -> None:
    """Let botocore send a body that checks the fence of this thread's run, if there is one."""
    fence = RUN_FENCE.get()
    if fence is not None:
        request.body = _CheckedBody(request.body, fence)


_CHECK_ACCESS = (
    "Check table, region and endpoint_url, and that the credentials may describe, read and write"
    " the table."
)


@dataclass(frozen=True, slots=True)
class _Explanation:
    """What an error of boto3 means: the error to raise (its class, its problem `what`, its next
    step), the state of the entries, and for how many seconds to pause (None: as the policy says).
    """

    what: str
    step: str = ""
    kind: type[errors.AdjunctError] = errors.TableError
    state: State = State.REFUSED
    pause: float | None = None


def problem_from_boto_error(error: BaseException, label: str, *, sent: bool = True) -> Problem:
    """Return the problem of the entries whose request raised `error`, which is one of boto3's or
    ours.

    `sent`: DynamoDB may have received the request, so without an answer its outcome is unknown.
    """
    if isinstance(error, errors.AdjunctError):
        if isinstance(error, errors.TableUnavailableError):
            state = State.FAILED
        else:
            state = State.REFUSED
        return Problem(state, error, getattr(error, "retry_after", None))
    code = error_code(error)
    stale, _ = stale_reason(error)
    is_throttled = code in _THROTTLED or _http_status(error) == 429
    if is_throttled and not stale:
        throttled = throttled_problem(label, code, _retry_after(error))
        assert throttled.error is not None
        throttled.error.__cause__ = error
        return throttled
    explanation = _explain(error, sent=sent)
    described = explanation.kind(f"{label}: {explanation.what}.", explanation.step, table=label)
    described.__cause__ = error
    is_of_request = explanation.kind is errors.TableAccessError or code not in _OF_THE_ENTRY
    return Problem(explanation.state, described, explanation.pause, of_request=is_of_request)


def _http_status(error: BaseException) -> int:
    """Return the status of DynamoDB's answer; 0 for an error without an answer."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return 0
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _explain(error: BaseException, *, sent: bool) -> _Explanation:
    """Return what an error means that is none of ours; `sent`: DynamoDB may have received the
    request.
    """
    from botocore import exceptions as boto

    stale, stale_step = stale_reason(error)
    if stale:  # the service did nothing
        code = error_code(error) or type(error).__name__
        return _Explanation(
            f"a request was refused ({code}): {stale}",
            stale_step,
            errors.TableUnavailableError,
            State.FAILED,
            _STALE_SECONDS,
        )
    if isinstance(error, boto.ClientError):
        return _explain_answer(error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        what = f"it can't be accessed ({error})"
        return _Explanation(what, _CHECK_ACCESS, errors.TableAccessError)
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError | OSError):
        unconnected = (
            boto.EndpointConnectionError | boto.ConnectTimeoutError | boto.ProxyConnectionError
        )
        sent = sent and not isinstance(error, unconnected)
        lost = "got no answer"
        if sent:
            lost = "was sent, and no answer came"
        return _Explanation(
            f"a request {lost} ({type(error).__name__})",
            "The request is retried; if it keeps failing, check the network and DynamoDB's status.",
            errors.TableUnavailableError,
            State.UNKNOWN if sent else State.FAILED,
        )
    return _Explanation(f"a request failed ({type(error).__name__}: {error})")


def _explain_answer(error: ClientError) -> _Explanation:
    """Return what an answer of DynamoDB's means, but for throttling."""
    code = error_code(error)
    text = str(error.response.get("Error", {}).get("Message", ""))
    if code in _NO_EFFECT or _http_status(error) >= 500:
        # A server that answers with an internal error may have written before it failed.
        return _Explanation(
            f"DynamoDB answered {code} ({text})",
            "The request is retried; if it keeps failing, contact AWS.",
            errors.TableUnavailableError,
            State.FAILED if code in _NO_EFFECT else State.UNKNOWN,
            _retry_after(error),
        )
    if code == "ValidationException" and _OTHER_KEY.search(text):
        return _Explanation(
            f"its key is another one than when it was opened ({text})",
            "Declare the key that the table has now, or use another table; then run again.",
            errors.TableAccessError,
        )
    if code in _NO_ACCESS:
        what = f"it can't be accessed ({code}: {text})"
        return _Explanation(what, _CHECK_ACCESS, errors.TableAccessError)
    what = f"DynamoDB rejected the request ({code}: {text})"
    return _Explanation(what, "Correct the data or the table.")


def throttled_problem(label: str, what: str, retry_after: float | None = None) -> Problem:
    """The problem of entries that had no effect, because DynamoDB has no capacity for them now."""
    error = errors.TableUnavailableError(
        f"{label} has no capacity for the request now ({what}).",
        "The request is retried; if it keeps failing, lower the table's rate_limit or raise its"
        " capacity.",
        table=label,
    )
    return Problem(State.FAILED, error, THROTTLED_SECONDS if retry_after is None else retry_after)


def error_code(error: BaseException) -> str:
    """The code in an answer of DynamoDB's that boto3 raised as `error`; "" for any other error."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        return str(response.get("Error", {}).get("Code", ""))
    return ""


def _retry_after(error: Any) -> float | None:
    """Return the seconds to wait that an answer asks for; None if it doesn't."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None


def _client_error(label: str, error: Exception) -> errors.ConfigurationError:
    """Return the error for a client or session that boto3 can't create."""
    problem = f"{label}: boto3 can't create a client ({type(error).__name__}: {error})."
    return errors.ConfigurationError(
        problem, "Pass region=… or set AWS_REGION, and check boto3's configuration.", table=label
    )
