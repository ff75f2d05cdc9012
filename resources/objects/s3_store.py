"""An object store in an S3 bucket, by boto3, for AWS and other servers that honour conditional
writes.
"""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as EndpointError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.aws import new_session, stale_reason
from dagster_adjunct.resources.objects import store
from dagster_adjunct.resources.objects.store import (
    ObjectInfo,
    ObjectStore,
    S3Options,
    StoreDescriptor,
    StoredObject,
)
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


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


class StoreBusyError(errors.StoreUnavailableError):
    """The store did nothing, because of throttling or a conflict of concurrent writers (409):
    retry.
    """


class StaleCredentialsError(StoreBusyError):
    """The store did nothing, because the credentials have expired or a clock is wrong: retry,
    with fresh ones.
    """


class UploadGoneError(errors.StoreUnavailableError):
    """The multipart upload does not exist (any more): check whether it was completed, else start
    again.
    """


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request as errors describe it: "GET of 'a/b' in s3://bucket/lake". Of several keys,
    `key` is the first.
    """

    action: str  # such as "GET"
    url: str | None = None  # of the store
    key: str | None = None
    more: int = 0  # keys besides the first

    def __str__(self) -> str:
        more = ""
        if self.more:
            more = f" and {self.more} more"
        if self.key is None:
            return self.action
        return f"{self.action} of {self.key!r}{more} in {self.url}"


def _translate_error(error: ClientError | BotoCoreError, request: S3Request) -> errors.AdjunctError:
    """Return the Adjunct error for a botocore error.

    `StoreBusyError` means that nothing was done, plain `StoreUnavailableError` that the outcome is
    unknown, `ConfigurationError` that the request can't be sent as things are set up.
    """
    stale = stale_reason(error)
    if isinstance(error, ClientError):
        answer = _describe_answer(error)
        if not stale.reason:
            return _translate_response(error, request, answer)
        return StaleCredentialsError(
            f"{request} was answered {answer}: {stale.reason}.",
            stale.next_step,
            url=request.url,
            key=request.key,
        )
    cause = f"{type(error).__name__}: {error}"
    if stale.reason:
        return StaleCredentialsError(
            f"{request} could not be sent: {stale.reason} ({cause}).",
            stale.next_step,
            url=request.url,
            key=request.key,
        )
    if isinstance(error, EndpointError | HTTPClientError | IncompleteReadError):
        return errors.StoreUnavailableError(
            f"{request} got no answer: {cause}",
            "Check the endpoint and the network, then run it again.",
            url=request.url,
            key=request.key,
        )
    return errors.ConfigurationError(
        f"{request} could not be sent: {cause}",
        "Check boto3's credentials, region and endpoint (AWS_PROFILE, AWS_REGION,"
        " ADJUNCT_S3_ENDPOINT, …).",
        url=request.url,
        key=request.key,
    )


def _status(error: ClientError) -> int:
    """Return the HTTP status of an answer, 0 without one."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _describe_answer(error: ClientError) -> str:
    """Return the status and the code of an answer; a HEAD's has no body and so no code but the
    status.
    """
    status = str(_status(error))
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in ("", status):
        return status
    return f"{status} {code}"


def _translate_response(error: ClientError, request: S3Request, answer: str) -> errors.AdjunctError:
    """Return the Adjunct error for a rejected request; `answer` is its status and code as text."""
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    message = str(details.get("Message", ""))
    status = _status(error)

    def translated(
        kind: type[errors.AdjunctError], step: str, reason: str = "", **about: str | None
    ) -> errors.AdjunctError:
        because = f": {reason}" if reason else ""
        return kind(f"{request} was answered {answer}{because}.", step, **about)

    url = request.url
    key = request.key
    if status == 404 or code in ("NoSuchBucket", "NoSuchUpload"):
        return _missing_error(code, request, translated)
    if code in _THROTTLED or status == 429:
        return translated(
            StoreBusyError, "Lower the request rate, then run it again.", url=url, key=key
        )
    if status == 409:
        return translated(StoreBusyError, "Run it again.", "concurrent writers", url=url, key=key)
    if status == 412:
        return translated(
            errors.PreconditionFailedError, "Read the object again, then retry.", key=key
        )
    if status == 501 or code == "NotImplemented":
        step = "Use a store with conditional writes, or upgrade this one."
        return translated(
            errors.ConditionalWritesUnsupportedError, step, "the store does not support it", url=url
        )
    if status in (401, 403):
        step = "Check the credentials, the bucket's policy and the clock."
        reason = "the credentials do not allow it"
        return translated(errors.ConfigurationError, step, reason, url=url, key=key)
    if status >= 500 or status == 0 or code == "RequestTimeout":
        return translated(errors.StoreUnavailableError, "Run it again.", url=url, key=key)
    step = "Check the URL and the ADJUNCT_S3_… settings."
    return translated(errors.ConfigurationError, step, message.rstrip("."), url=url, key=key)


def _missing_error(
    code: str, request: S3Request, translated: Callable[..., errors.AdjunctError]
) -> errors.AdjunctError:
    """Return the error for a missing bucket, upload or object."""
    if code == "NoSuchBucket":
        step = "Create it, or correct the URL."
        reason = "the bucket does not exist"
        return translated(errors.ConfigurationError, step, reason, url=request.url)
    if code == "NoSuchUpload":
        return translated(UploadGoneError, "Run it again.", url=request.url, key=request.key)
    step = "Check the URL, and whether the object was deleted."
    return translated(errors.ObjectNotFoundError, step, key=request.key)


def send_request(request: S3Request, send: Callable[[], T]) -> T:
    """Send one request and return its result; translate its errors."""
    try:
        return send()
    except (ClientError, BotoCoreError) as error:
        raise _translate_error(error, request) from error


def retry_request(
    request: S3Request,
    send: Callable[[], T],
    attempts: int,
    on: type[errors.StoreUnavailableError] = errors.StoreUnavailableError,
) -> T:
    """Send a request and return its result; repeat it with back-off, `attempts` times in all,
    after errors `on`.
    """
    return Retrying(
        retry=retry_if_exception_type(on),
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        reraise=True,
    )(partial(send_request, request, send))


def head_object(client: S3Client, **at: Any) -> Any:
    """Return the headers of an object. Raises boto3's errors with their codes.

    An answer to a HEAD has no body, and so states no code. If it is a rejection, a GET of the first
    byte is answered with the code.
    """
    try:
        return client.head_object(**at)
    except ClientError as error:
        if _status(error) not in (400, 401, 403):
            raise
        try:
            client.get_object(**at, Range="bytes=0-0")["Body"].close()
        except ClientError as stated:
            if _status(stated) in (400, 401, 403):
                raise stated from error
        raise


def list_objects(
    client: S3Client,
    bucket: str,
    prefix: str,
    send: Callable[[Callable[[], Any]], Any],
    after: str = "",
) -> Iterator[Any]:
    """Yield the entries (of boto3's `Contents`) of all keys that begin with the prefix and come
    after the key `after`.

    `send` calls the function that it gets, which requests one page, and may retry it.
    """
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    if after:
        arguments["StartAfter"] = after
    while True:
        page = send(partial(client.list_objects_v2, **arguments))
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        arguments["ContinuationToken"] = page["NextContinuationToken"]


_MOST_PARTS = 10_000
_THREADS = 4


def upload_multipart(
    client: S3Client,
    path: Path,
    at: dict[str, Any],
    extra: dict[str, Any],
    options: S3Options,
    request: S3Request,
) -> str:
    """Create the object from the file by a multipart upload and return its ETag.

    `at` is the object's bucket and key, `extra` are further arguments for creating it.

    Raises `PreconditionFailedError` if the object exists, `StoreBusyError` or `UploadGoneError` if
    the whole upload must be repeated, and `StoreUnavailableError` if the last reply was lost. A
    failed upload's parts are deleted.
    """
    size = path.stat().st_size
    part_size = max(options.part_size, -(-size // _MOST_PARTS))
    upload_id = retry_request(
        request, partial(client.create_multipart_upload, **at, **extra), options.attempts
    )["UploadId"]
    try:
        parts = _send_parts(
            client, path, size, part_size, {**at, "UploadId": upload_id}, options, request
        )
        completion: Any = {
            "UploadId": upload_id,
            "MultipartUpload": {"Parts": parts},
            "IfNoneMatch": "*",
        }
        return send_request(request, partial(client.complete_multipart_upload, **at, **completion))[
            "ETag"
        ]
    except BaseException:
        # Also decides the outcome after a lost reply: a completed upload can't be aborted, nor vice
        # versa.
        with suppress(errors.AdjunctError):
            send_request(request, partial(client.abort_multipart_upload, **at, UploadId=upload_id))
        raise


def _send_parts(
    client: S3Client,
    path: Path,
    size: int,
    part_size: int,
    at: dict[str, Any],
    options: S3Options,
    request: S3Request,
) -> list[Any]:
    """Upload a file in parts and return what completes the upload: their numbers and ETags."""
    file = os.open(path, os.O_RDONLY)

    def send(number: int) -> dict[str, Any]:
        # Read inside the thread, so that only the parts in flight are in memory.
        data = os.pread(file, part_size, (number - 1) * part_size)
        answer = retry_request(
            request,
            partial(client.upload_part, **at, PartNumber=number, Body=data),
            options.attempts,
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        return map_in_threads(send, range(1, max(1, -(-size // part_size)) + 1), _THREADS)
    finally:
        os.close(file)


# Every create has a unique token, which identifies our own object after a lost reply.
_TOKEN = "adjunct-write"


class _Connected(NamedTuple):
    """The client of the process with this id."""

    process: int
    client: S3Client


class S3Store(ObjectStore):
    """Objects below `s3://bucket/prefix`.

    botocore's retries are off, because a conditional write that it repeated after a success would
    report a conflict. Unconditional requests are retried here with back-off, conditional ones only
    if the store reports that it did nothing. After a lost reply `put_if_absent` and `upload` look
    for their own token; `put_if_match` raises `StoreUnavailableError`, since only the caller can
    recognize its own write.

    The client is created on first use in each process, and is not pickled.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not bucket:
            problem = f"lake {url!r} names no bucket: expected s3://BUCKET/PREFIX."
            raise errors.ConfigurationError(problem, argument="url")
        self._bucket = bucket
        self._prefix = ""
        if prefix:
            self._prefix = f"{store.check_key(prefix)}/"
        self._options = options or S3Options()
        self._lock = threading.Lock()
        self._connected: _Connected | None = None

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def descriptor(self) -> StoreDescriptor:
        return S3Descriptor(self.url, self._options)

    def get(self, key: str) -> StoredObject:
        def send() -> StoredObject:
            answer = self._client().get_object(**self._at(key))
            return StoredObject(answer["Body"].read(), answer["ETag"])

        return self._send("GET", key, send)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def send() -> bytes:
            try:
                answer = self._client().get_object(
                    **self._at(key), Range=f"bytes={start}-{start + length - 1}"
                )
            except ClientError as error:
                if _status(error) != 416:
                    raise
                return b""  # the range begins at or after the object's end
            data: bytes = answer["Body"].read()
            if "ContentRange" not in answer:  # a server or proxy that answers with the whole object
                data = data[start:]
            return data[:length]

        if length <= 0:  # no range of HTTP is empty; also raises for a missing object
            return self.get(key).data[:0]
        return self._send("GET of a range", key, send)

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._head(key)
        if answer is None:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer["ETag"], answer["LastModified"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        store.check_prefix(prefix)
        send = partial(self._send, "LIST", prefix)
        for entry in list_objects(self._client(), self._bucket, self._prefix + prefix, send):
            key = entry["Key"].removeprefix(self._prefix)
            yield ObjectInfo(key, entry["Size"], entry["ETag"], entry["LastModified"])

    def download(self, key: str, path: Path) -> None:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")

        def send() -> None:
            body = self._client().get_object(**self._at(key))["Body"]
            with temporary.open("wb") as file:
                for chunk in body.iter_chunks(1024 * 1024):
                    file.write(chunk)

        with errors.translate_file_errors(path.parent, f"a copy of object {key!r} in {self.url}"):
            try:
                self._send("GET", key, send)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> str:
        return self._send("PUT", key, partial(self._put, key, data))

    def put_if_absent(self, key: str, data: bytes) -> str:
        token = uuid.uuid4().hex
        return self._create(
            key, token, lambda: self._put(key, data, IfNoneMatch="*", Metadata={_TOKEN: token})
        )

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        request = S3Request("PUT with If-Match", self.url, key)
        try:
            return retry_request(
                request,
                partial(self._put, key, data, IfMatch=etag),
                self._options.attempts,
                StoreBusyError,
            )
        except errors.ObjectNotFoundError:
            raise store.etag_error(self.url, key, None, etag) from None

    def upload(self, path: Path, key: str) -> str:
        token = uuid.uuid4().hex
        is_large = path.stat().st_size >= self._options.multipart_threshold
        if is_large and self.head(key) is not None:
            # Saves an upload; the race is decided at its end.
            raise store.object_exists_error(self.url, key)

        def send() -> str:
            if is_large:
                extra = {**self._encryption(), "Metadata": {_TOKEN: token}}
                request = S3Request("upload", self.url, key)
                return upload_multipart(
                    self._client(), path, self._at(key), extra, self._options, request
                )
            with path.open("rb") as file:
                return self._put(key, file, IfNoneMatch="*", Metadata={_TOKEN: token})

        return self._create(key, token, send)

    def delete(self, key: str) -> None:
        self._send("DELETE", key, lambda: self._client().delete_object(**self._at(key)))

    def delete_many(self, keys: Iterable[str]) -> None:
        all_of_them = [*keys]
        for start in range(0, len(all_of_them), 1000):
            some = all_of_them[start : start + 1000]
            objects = [{"Key": self._at(key)["Key"]} for key in some]
            request = S3Request("DELETE", self.url, some[0], len(some) - 1)
            retry_request(
                request, partial(self._delete_objects, request, objects), self._options.attempts
            )

    def spark_uri(self, key: str) -> str:
        return f"s3a://{self._bucket}/{self._prefix}{store.check_key(key)}"

    def staging_dir(self) -> Path:
        folder = Path(tempfile.gettempdir()) / f"adjunct-staging-{os.getuid()}"
        with errors.translate_file_errors(folder, f"files for {self.url}"):
            folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            problem = f"folder {folder} belongs to another user."
            raise errors.ConfigurationError(
                problem, "Set TMPDIR to a folder of your own.", setting="TMPDIR"
            )
        return folder

    def _create(self, key: str, token: str, send: Callable[[], str]) -> str:
        """Create an object by `send`, repeated until the outcome is known, and return its ETag.

        `token` is in the object's metadata: if an existing object has it, we created it. Raises
        ObjectExistsError.
        """
        request = S3Request("PUT with If-None-Match", self.url, key)

        def attempt() -> str:
            try:
                return send_request(request, send)
            except StoreBusyError:
                raise
            except (
                errors.PreconditionFailedError,
                UploadGoneError,
                errors.StoreUnavailableError,
            ) as error:
                # Once, since the whole attempt is retried anyway.
                head = self._head(key, attempts=1)
                if head is not None:
                    if head["Metadata"].get(_TOKEN) == token:
                        return str(head["ETag"])
                    raise store.object_exists_error(self.url, key) from None
                if isinstance(error, errors.PreconditionFailedError):
                    # Deleted between the two requests.
                    raise StoreBusyError(
                        error.problem, error.next_step, url=self.url, key=key
                    ) from error
                raise

        return retry_request(request, attempt, self._options.attempts)

    def _put(self, key: str, data: Any, **conditions: Any) -> str:
        """Send the data of an object under these conditions and return its ETag; one request."""
        return self._client().put_object(
            **self._at(key), Body=data, **self._encryption(), **conditions
        )["ETag"]

    def _head(self, key: str, attempts: int | None = None) -> Any | None:
        """Return the headers of an object, None if it does not exist."""
        try:
            return self._send(
                "HEAD", key, lambda: head_object(self._client(), **self._at(key)), attempts
            )
        except errors.ObjectNotFoundError:
            return None

    def _delete_objects(self, request: S3Request, objects: Sequence[Any]) -> None:
        """Delete objects in one request. Raises an error if one of them could not be deleted."""
        answer = self._client().delete_objects(
            Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
        )
        for error in answer.get("Errors", []):
            key = error.get("Key")
            code = error.get("Code")
            refusal = f"{request}: {key} was answered {code}."
            if code == "AccessDenied":
                step = "Allow s3:DeleteObject on the lake's prefix."
                raise errors.ConfigurationError(refusal, step, url=self.url, key=key)
            if code != "NoSuchKey":
                raise errors.StoreUnavailableError(refusal, "Run it again.", url=self.url, key=key)

    def _encryption(self) -> dict[str, Any]:
        """Return the arguments that encrypt a new object."""
        settings = {
            "ServerSideEncryption": self._options.sse,
            "SSEKMSKeyId": self._options.sse_kms_key_id,
        }
        return {name: value for name, value in settings.items() if value}

    def _at(self, key: str) -> Any:
        """Return the arguments that name an object."""
        return {"Bucket": self._bucket, "Key": self._prefix + store.check_key(key)}

    def _send(self, action: str, key: str, send: Callable[[], T], attempts: int | None = None) -> T:
        """Return the result of a request, which is repeated after transient errors."""
        return retry_request(
            S3Request(action, self.url, key), send, attempts or self._options.attempts
        )

    def _client(self) -> S3Client:
        """Return this process's client, made on first use."""
        connected = self._connected
        if connected is not None and connected.process == os.getpid():
            # Without the lock: a fork while another thread holds it would copy it locked.
            return connected.client
        with self._lock:
            # Forked workers need their own: a shared socket would mix the answers of two processes.
            if self._connected is None or self._connected.process != os.getpid():
                client = create_s3_client(self._options, S3Request(f"opening {self.url}", self.url))
                self._connected = _Connected(os.getpid(), client)
            return self._connected.client


def create_s3_client(options: S3Options, request: S3Request) -> S3Client:
    """Return a new client without retries; `request` describes its purpose in errors. Raises
    ConfigurationError for an endpoint that is not the URL of a server.
    """
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        max_pool_connections=32,
        s3={"addressing_style": "path"} if options.path_style else {},
        # Only if S3 requires it: many servers do not support the newer checksums yet. So botocore
        # validates no answer, and raises no FlexibleChecksumError.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        settings: Any = {
            "endpoint_url": options.endpoint,
            "region_name": options.region,
            "config": config,
        }
        client = cast(
            "S3Client", send_request(request, lambda: new_session().create_client("s3", **settings))
        )
    except ValueError:  # its text is the endpoint, which may hold a login
        problem = (
            f"{request}: boto3's S3 endpoint is not a URL of a server (not shown here, as it may"
            " contain a login)."
        )
        step = (
            "Write it like https://s3.example.com:9000 (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL,"
            " boto3's configuration)."
        )
        raise errors.ConfigurationError(
            problem, step, setting="AWS_ENDPOINT_URL_S3", url=request.url
        ) from None
    store.check_endpoint(client.meta.endpoint_url)
    return client


@dataclass(frozen=True, slots=True)
class S3Descriptor(StoreDescriptor):
    """The URL and options of a store on S3."""

    def connect(self) -> ObjectStore:
        return S3Store(self.url, self.s3 or S3Options())
