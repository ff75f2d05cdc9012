"""What answers of an HTTP service, and missing ones, say of an entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import AdjunctError, TableAccessError, TableError, TableUnavailableError
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from datetime import datetime

    import httpx

READS = ("GET", "HEAD")
_SHOWN = 300  # characters of a body


@dataclass(eq=False, repr=False, kw_only=True)
class HttpUnavailableError(TableUnavailableError):
    """The service did not do it now. `had_effect`: False where it surely did nothing, None where nobody knows."""

    status: int | None = None
    retry_after: float | None = None  # seconds
    had_effect: bool | None = None


def error_of(answer: httpx.Response, label: str, secrets: Iterable[str]) -> AdjunctError:
    """The error that an answer stands for that is no success; it shows the beginning of its body, and no secret."""
    status = answer.status_code
    beginning = _said(answer.text, secrets)
    what = f"{label}: {answer.request.method} {answer.request.url.copy_with(query=None)}"
    if status == 429 or status >= 500 or status == 408:
        wait = seconds_of(answer.headers.get("Retry-After"), utc_now())
        nothing_done = status == 429 or (status == 503 and wait is not None) or answer.request.method in READS
        return HttpUnavailableError(
            f"{what} was answered with {status}{beginning}.",
            "It is tried again; if that goes on, ask who runs the service.",
            table=label,
            status=status,
            retry_after=wait,
            had_effect=False if nothing_done else None,
        )
    kind = TableAccessError if status in (401, 403, 407) else TableError
    return kind(f"{what} was refused with {status}{beginning}.", "Correct the request or the declaration.", table=label)


def seconds_of(retry_after: str | None, now: datetime) -> float | None:
    """How long a Retry-After header asks to wait from `now` on, in seconds; it is written as seconds or as a date."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def lost(error: Exception, label: str, method: str, url: str, secrets: Iterable[str]) -> HttpUnavailableError:
    """The error for a request without an answer; a write had no effect where no connection was made."""
    import httpx

    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    what = "can't be reached" if unsent else "did not answer"
    return HttpUnavailableError(
        f"{label}: {method} {url}: the service {what} ({type(error).__name__}{_said(str(error), secrets)}).",
        "Check that the service runs and can be reached from here; it is tried again.",
        table=label,
        had_effect=False if unsent or method in READS else None,
    )


def _said(text: str, secrets: Iterable[str]) -> str:
    """The beginning of what was said, behind a colon."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    return f": {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}" if text else ""
