"""Uploading a large file to S3 in parts, so that it appears whole, once, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.s3_errors import S3Request, asking, repeated

if TYPE_CHECKING:
    from pathlib import Path

    from mypy_boto3_s3 import S3Client

    from dagster_adjunct.resources.objects.object_store import S3Options

_MOST_PARTS = 10_000
_THREADS = 4


def multipart(
    client: S3Client, path: Path, at: dict[str, Any], extra: dict[str, Any], options: S3Options, what: S3Request
) -> str:
    """Send the file in parts, create the object if it is absent, and return its ETag.

    Raises `PreconditionFailedError` when it is there already, `StoreBusyError` or `UploadGoneError` when the
    whole upload must be done again, and `StoreUnavailableError` when the last reply was lost. Parts that were
    sent are dropped whenever the upload is known to have failed.
    """
    size = path.stat().st_size
    part_size = max(options.part_size, -(-size // _MOST_PARTS))
    upload_id = repeated(lambda: asking(what, lambda: client.create_multipart_upload(**at, **extra)), options.attempts)[
        "UploadId"
    ]
    try:
        parts = _send_parts(client, path, size, part_size, {**at, "UploadId": upload_id}, options, what)
        return asking(
            what,
            lambda: client.complete_multipart_upload(
                **at, UploadId=upload_id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            ),
        )["ETag"]
    except BaseException:
        # After a lost reply to the last request this settles the matter: an upload that was completed can't be
        # aborted any more, and one that was not never will be.
        with suppress(AdjunctError):
            asking(what, lambda: client.abort_multipart_upload(**at, UploadId=upload_id))
        raise


def _send_parts(
    client: S3Client, path: Path, size: int, part_size: int, at: dict[str, Any], options: S3Options, what: S3Request
) -> list[Any]:
    file = os.open(path, os.O_RDONLY)

    def send(number: int) -> dict[str, Any]:
        # Read inside the thread, so that no more than the parts in flight are in memory.
        data = os.pread(file, part_size, (number - 1) * part_size)
        answer = repeated(
            lambda: asking(what, lambda: client.upload_part(**at, PartNumber=number, Body=data)), options.attempts
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(send, range(1, max(1, -(-size // part_size)) + 1)))
    finally:
        os.close(file)
