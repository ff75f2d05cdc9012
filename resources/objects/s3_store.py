"""An object store in an S3 bucket, by boto3, for AWS and other servers that honour conditional writes."""

from __future__ import annotations

import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as EndpointError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConditionalWritesUnsupportedError,
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.file_errors import translate_file_errors
from dagster_adjunct.resources.objects.store import (
    ObjectInfo,
    ObjectStore,
    S3Options,
    StoreDescriptor,
    StoredObject,
    check_endpoint,
    check_key,
    check_prefix,
)

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


class StoreBusyError(StoreUnavailableError):
    """The store did nothing (409 among concurrent writers, throttling): retry."""


class UploadGoneError(StoreUnavailableError):
    """The multipart upload does not exist (any more): check whether it was completed, else start again."""


@dataclass(frozen=True, slots=True)
class S3Request:
    """A request as errors describe it: "GET of 'a/b' in s3://bucket/lake". `key` is the first of several."""

    request: str
    url: str | None = None  # of the store
    key: str | None = None
    more: int = 0  # keys besides the first

    def __str__(self) -> str:
        more = f" and {self.more} more" if self.more else ""
        return self.request if self.key is None else f"{self.request} of {self.key!r}{more} in {self.url}"


def translate_s3_error(error: Exception, what: S3Request) -> AdjunctError:
    """Return the Adjunct error for a botocore error.

    `StoreBusyError` means that nothing was done, plain `StoreUnavailableError` that the outcome is unknown.
    """
    if isinstance(error, ClientError):
        return _translate_response(error, what)
    if isinstance(error, EndpointError | HTTPClientError | IncompleteReadError):
        return StoreUnavailableError(
            f"{what} got no answer: {_describe_error(error)}",
            "Check the endpoint and the network, then run it again.",
            url=what.url,
            key=what.key,
        )
    if isinstance(error, BotoCoreError):
        return ConfigurationError(
            f"{what} could not be sent: {_describe_error(error)}",
            "Check boto3's credentials, region and endpoint (AWS_PROFILE, AWS_REGION, ADJUNCT_S3_ENDPOINT, …).",
            url=what.url,
            key=what.key,
        )
    return StoreUnavailableError(
        f"{what} failed: {_describe_error(error)}", "Run it again.", url=what.url, key=what.key
    )


def _translate_response(error: ClientError, what: S3Request) -> AdjunctError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    answer = f"{what} was answered {status} {code}"
    if code in _THROTTLED or status == 429:
        return StoreBusyError(f"{answer}.", "Lower the request rate, then run it again.", url=what.url, key=what.key)
    if status == 409:
        return StoreBusyError(f"{answer}: concurrent writers.", "Run it again.", url=what.url, key=what.key)
    if status == 412:
        return PreconditionFailedError(f"{answer}.", "Read the object again, then retry.", key=what.key)
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
            f"{answer}: the store does not support it.",
            "Use a store with conditional writes, or upgrade this one.",
            url=what.url,
        )
    if status in (401, 403):
        return ConfigurationError(
            f"{answer}: the credentials do not allow it.",
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


def is_range_past_end(error: ClientError) -> bool:
    """Return whether a ranged GET failed because the object ends before the range."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416


def send_request(what: S3Request, request: Callable[[], T]) -> T:
    """Send one request and return its result; translate its errors."""
    try:
        return request()
    except (ClientError, BotoCoreError) as error:
        raise translate_s3_error(error, what) from error


def retry_request(
    request: Callable[[], T], attempts: int, on: type[StoreUnavailableError] = StoreUnavailableError
) -> T:
    """Return the result of `request`, repeated up to `attempts` times while it raises `on`, with back-off."""
    return Retrying(
        retry=retry_if_exception_type(on),
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        reraise=True,
    )(request)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_MOST_PARTS = 10_000
_THREADS = 4


def upload_multipart(
    client: S3Client, path: Path, at: dict[str, Any], extra: dict[str, Any], options: S3Options, what: S3Request
) -> str:
    """Create the object from the file by a multipart upload and return its ETag.

    Raises `PreconditionFailedError` if the object exists, `StoreBusyError` or `UploadGoneError` if the whole upload
    must be repeated, and `StoreUnavailableError` if the last reply was lost. A failed upload's parts are deleted.
    """
    size = path.stat().st_size
    part_size = max(options.part_size, -(-size // _MOST_PARTS))
    upload_id = retry_request(
        lambda: send_request(what, lambda: client.create_multipart_upload(**at, **extra)), options.attempts
    )["UploadId"]
    try:
        parts = _send_parts(client, path, size, part_size, {**at, "UploadId": upload_id}, options, what)
        return send_request(
            what,
            lambda: client.complete_multipart_upload(
                **at, UploadId=upload_id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            ),
        )["ETag"]
    except BaseException:
        # This decides the outcome after a lost reply: a completed upload can't be aborted, and an aborted one can't be
        # completed.
        with suppress(AdjunctError):
            send_request(what, lambda: client.abort_multipart_upload(**at, UploadId=upload_id))
        raise


def _send_parts(
    client: S3Client, path: Path, size: int, part_size: int, at: dict[str, Any], options: S3Options, what: S3Request
) -> list[Any]:
    file = os.open(path, os.O_RDONLY)

    def send(number: int) -> dict[str, Any]:
        # Read inside the thread, so that only the parts in flight are in memory.
        data = os.pread(file, part_size, (number - 1) * part_size)
        answer = retry_request(
            lambda: send_request(what, lambda: client.upload_part(**at, PartNumber=number, Body=data)), options.attempts
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(send, range(1, max(1, -(-size // part_size)) + 1)))
    finally:
        os.close(file)


# Every create has a unique token, which identifies our own object after a lost reply.
_TOKEN = "adjunct-write"


class S3Store:
    """Objects below `s3://bucket/prefix`.

    botocore's retries are off, because a conditional write that it repeated after a success would report a conflict.
    Unconditional requests are retried here with back-off, conditional ones only if the store reports that it did
    nothing. After a lost reply `put_if_absent` and `upload` look for their own token; `put_if_match` raises
    `StoreUnavailableError`, since only the caller can recognize its own write.

    The client is created on first use in each process, and is not pickled.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not bucket:
            raise ConfigurationError(f"lake {url!r} names no bucket: expected s3://BUCKET/PREFIX.", argument="url")
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self._options = options or S3Options()
        self._lock = threading.Lock()
        self._connected: tuple[int, S3Client] | None = None

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def descriptor(self) -> StoreDescriptor:
        return StoreDescriptor(self.url, self._options)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (StoreDescriptor.open, (self.descriptor,))

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def get(self, key: str) -> StoredObject:
        def request() -> StoredObject:
            answer = self._client().get_object(**self._at(key))
            return StoredObject(answer["Body"].read(), answer["ETag"])

        return self._send("GET", key, request)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def request() -> bytes:
            try:
                answer = self._client().get_object(**self._at(key), Range=f"bytes={start}-{start + length - 1}")
            except ClientError as error:
                if is_range_past_end(error):
                    return b""
                raise
            return answer["Body"].read()[:length]

        if length <= 0:
            return self.get(key).data[:0]
        return self._send("GET of a range", key, request)

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._head(key)
        if answer is None:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer["ETag"], answer["LastModified"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        more: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._send("LIST", prefix, partial(self._client().list_objects_v2, **more))
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                yield ObjectInfo(key, entry["Size"], entry["ETag"], entry["LastModified"])
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def download(self, key: str, path: Path) -> None:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")

        def request() -> None:
            body = self._client().get_object(**self._at(key))["Body"]
            with temporary.open("wb") as file:
                for chunk in body.iter_chunks(1024 * 1024):
                    file.write(chunk)

        with translate_file_errors(path.parent, f"a copy of object {key!r} in {self.url}"):
            try:
                self._send("GET", key, request)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> str:
        return self._send("PUT", key, partial(self._put, key, data))

    def put_if_absent(self, key: str, data: bytes) -> str:
        token = uuid.uuid4().hex
        return self._create(key, token, lambda: self._put(key, data, IfNoneMatch="*", Metadata={_TOKEN: token}))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        what = self._request_name("PUT with If-Match", key)
        try:
            return retry_request(
                lambda: send_request(what, lambda: self._put(key, data, IfMatch=etag)),
                self._options.attempts,
                on=StoreBusyError,
            )
        except ObjectNotFoundError:
            raise PreconditionFailedError(
                f"object {key!r} is not in {self.url}, expected it with ETag {etag}.",
                "Read it again, then retry.",
                key=key,
            ) from None

    def upload(self, path: Path, key: str) -> str:
        size = path.stat().st_size
        token = uuid.uuid4().hex
        if size < self._options.multipart_threshold:

            def send() -> str:
                with path.open("rb") as file:
                    return self._put(key, file, IfNoneMatch="*", Metadata={_TOKEN: token})

            return self._create(key, token, send)
        if self.head(key) is not None:  # to save a useless upload; the race is decided at its end
            raise self._exists_error(key)

        def send_parts() -> str:
            extra = {**self._encryption(), "Metadata": {_TOKEN: token}}
            return upload_multipart(
                self._client(), path, self._at(key), extra, self._options, self._request_name("upload", key)
            )

        return self._create(key, token, send_parts)

    def delete(self, key: str) -> None:
        self._send("DELETE", key, lambda: self._client().delete_object(**self._at(key)))

    def delete_many(self, keys: Iterable[str]) -> None:
        all_of_them = [*keys]
        for start in range(0, len(all_of_them), 1000):
            some = all_of_them[start : start + 1000]
            objects = [{"Key": self._at(key)["Key"]} for key in some]
            what = replace(self._request_name("DELETE", some[0]), more=len(some) - 1)
            retry_request(partial(self._delete_objects, what, objects), self._options.attempts)

    def spark_uri(self, key: str) -> str:
        return f"s3a://{self._bucket}/{self._prefix}{check_key(key)}"

    def staging_dir(self) -> Path:
        folder = Path(tempfile.gettempdir()) / f"adjunct-staging-{os.getuid()}"
        with translate_file_errors(folder, f"files for {self.url}"):
            folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigurationError(
                f"folder {folder} belongs to another user.", "Set TMPDIR to a folder of your own.", setting="TMPDIR"
            )
        return folder

    def _create(self, key: str, token: str, send: Callable[[], str]) -> str:
        """Repeat a create until its outcome is known; our token on the object shows that we won."""
        what = self._request_name("PUT with If-None-Match", key)

        def attempt() -> str:
            try:
                return send_request(what, send)
            except StoreBusyError:
                raise
            except (PreconditionFailedError, UploadGoneError, StoreUnavailableError) as error:
                head = self._head(key, attempts=1)  # the whole attempt is retried anyway
                if head is not None:
                    if head["Metadata"].get(_TOKEN) == token:
                        return str(head["ETag"])
                    raise self._exists_error(key) from None
                if isinstance(error, PreconditionFailedError):  # deleted between the two requests
                    raise StoreBusyError(error.problem, error.next_step, url=self.url, key=key) from error
                raise

        return retry_request(attempt, self._options.attempts)

    def _put(self, key: str, data: Any, **conditions: Any) -> str:
        return self._client().put_object(**self._at(key), Body=data, **self._encryption(), **conditions)["ETag"]

    def _head(self, key: str, attempts: int | None = None) -> Any | None:
        what = self._request_name("HEAD", key)
        try:
            return retry_request(
                lambda: send_request(what, lambda: self._client().head_object(**self._at(key))),
                attempts or self._options.attempts,
            )
        except ObjectNotFoundError:
            return None

    def _delete_objects(self, what: S3Request, objects: Sequence[Any]) -> None:
        answer = send_request(
            what,
            lambda: self._client().delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}),
        )
        for error in answer.get("Errors", []):
            refusal = f"{what}: {error.get('Key')} was answered {error.get('Code')}."
            if error.get("Code") == "AccessDenied":
                raise ConfigurationError(
                    refusal, "Allow s3:DeleteObject on the lake's prefix.", url=self.url, key=error.get("Key")
                )
            if error.get("Code") != "NoSuchKey":
                raise StoreUnavailableError(refusal, "Run it again.", url=self.url, key=error.get("Key"))

    def _encryption(self) -> dict[str, Any]:
        settings = {"ServerSideEncryption": self._options.sse, "SSEKMSKeyId": self._options.sse_kms_key_id}
        return {name: value for name, value in settings.items() if value}

    def _at(self, key: str) -> Any:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _request_name(self, request: str, key: str) -> S3Request:
        return S3Request(request, self.url, key)

    def _exists_error(self, key: str) -> ObjectExistsError:
        return ObjectExistsError(
            f"object {key!r} already exists in {self.url}.", "Read it, or use another key.", key=key
        )

    def _send(self, request: str, key: str, send: Callable[[], T]) -> T:
        what = self._request_name(request, key)
        return retry_request(lambda: send_request(what, send), self._options.attempts)

    def _client(self) -> S3Client:
        connected = self._connected
        if connected is not None and connected[0] == os.getpid():
            return connected[1]
        with self._lock:
            # Forked workers need their own: a shared socket would mix the answers of two processes.
            if self._connected is None or self._connected[0] != os.getpid():
                self._connected = (
                    os.getpid(),
                    create_s3_client(self._options, S3Request(f"opening {self.url}", self.url)),
                )
            return self._connected[1]


def create_s3_client(options: S3Options, what: S3Request) -> S3Client:
    """Return a new client without retries; `what` describes its purpose in errors."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        max_pool_connections=32,
        s3={"addressing_style": "path"} if options.path_style else {},
        # Only if S3 requires it: many servers do not support the newer checksums yet.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        client = send_request(
            what,
            lambda: boto3.session.Session().client(
                "s3", endpoint_url=options.endpoint, region_name=options.region, config=config
            ),
        )
    except ValueError:  # its text is the endpoint, which may hold a login
        raise ConfigurationError(
            f"{what}: boto3's S3 endpoint is not a URL of a server (not shown here, as it may contain a login).",
            "Write it like https://s3.example.com:9000 (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, boto3's configuration).",
            setting="AWS_ENDPOINT_URL_S3",
            url=what.url,
        ) from None
    check_endpoint(client.meta.endpoint_url)
    return client
