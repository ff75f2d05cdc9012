"""Notifications that an S3 bucket sends to an SQS queue when objects are created, as they are, by
SNS or by EventBridge.

A message says that there may be an object, and no more: messages are repeated, get lost, and come
in any order. They are deleted once what they say is committed. Those about other places, and those
that can't be read, stay in the queue, which moves them to its dead-letter queue if it has one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus, urlsplit

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger(__name__)
_AT_ONCE = 10
_WAIT_SECONDS = 1  # a short poll asks only some of the queue's servers
_REGION = re.compile(r"(?:^|\.)sqs\.(?P<region>[a-z0-9-]+)\.amazonaws\.")


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the queue: the paths of the objects that were created, relative to the stream's
    prefix.
    """

    receipt: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Notified:
    """What a queue's messages say. `unusable` says why messages stay in the queue, by their ids."""

    messages: Sequence[Message] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)
    more: bool = False

    @property
    def paths(self) -> list[str]:
        """The paths of the objects, each once."""
        return sorted({path for message in self.messages for path in message.paths})

    def receipts_without(self, left: Collection[str]) -> list[str]:
        """Return the receipts of the messages that are not about one of these files."""
        return [one.receipt for one in self.messages if not {*one.paths} & {*left}]


@dataclass(frozen=True, slots=True)
class Notifications:
    """A queue of notifications. Region, endpoint and credentials come from boto3's own chain; the
    region may also be in the URL.
    """

    queue_url: str

    def receive(self, bucket: str, prefix: str, most: int) -> Notified:
        """Return what the messages in the queue say about objects below a prefix of a bucket. After
        about `most` messages it stops, and says that there may be more.
        """
        messages: list[Message] = []
        unusable: dict[str, str] = {}
        seen: set[str] = set()
        while len(seen) < most:
            # A message may be received again: it is hidden for a while only.
            received = [one for one in self._receive() if one["MessageId"] not in seen]
            if not received:
                return Notified(messages, unusable)
            for one in received:
                seen.add(one["MessageId"])
                try:
                    paths = _paths_of(one["Body"], bucket, prefix)
                except ValueError as error:
                    unusable[f"message {one['MessageId']}"] = str(error)
                else:
                    messages.append(Message(one["ReceiptHandle"], paths))
        return Notified(messages, unusable, more=True)

    def delete(self, receipts: Sequence[str]) -> None:
        """Delete messages. What is not deleted comes again, and does no harm."""
        for at in range(0, len(receipts), _AT_ONCE):
            entries = []
            for number, receipt in enumerate(receipts[at : at + _AT_ONCE]):
                entries.append({"Id": str(number), "ReceiptHandle": receipt})
            try:
                self._ask(
                    "deleting messages",
                    partial(
                        self._client().delete_message_batch,
                        QueueUrl=self.queue_url,
                        Entries=entries,
                    ),
                )
            except errors.AdjunctError as error:
                _logger.warning("Messages come again: %s", error)
                return

    def _receive(self) -> list[Any]:
        """Return up to ten messages, none if the queue is empty."""
        receive = partial(
            self._client().receive_message,
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=_AT_ONCE,
            WaitTimeSeconds=_WAIT_SECONDS,
        )
        found = self._ask("receiving messages", receive)
        return list(found.get("Messages", ()))

    def _ask(self, action: str, send: Callable[[], Any]) -> Any:
        """Return what a request returns; translates its errors."""
        from botocore.exceptions import ClientError

        from dagster_adjunct.resources.objects.s3_store import S3Request, send_request

        def sent() -> Any:
            try:
                return send()
            except ClientError as error:
                if "NonExistentQueue" in str(error.response) or "QueueDoesNotExist" in str(error):
                    raise errors.ConfigurationError(
                        f"there is no queue {self.queue_url}.",
                        "Correct notifications=…, or create the queue.",
                        argument="notifications",
                    ) from error
                raise

        return send_request(S3Request(f"{action} of {self.queue_url}"), sent)

    def _client(self) -> Any:
        return _client_of(os.getpid(), self.queue_url)


@lru_cache(maxsize=8)
def _client_of(process: int, queue_url: str) -> Any:
    """Return this process's client: a forked worker must not share its parent's sockets."""
    from dagster_adjunct.resources.aws import new_session
    from dagster_adjunct.resources.objects.s3_store import S3Request, send_request

    found = _REGION.search(urlsplit(queue_url).hostname or "")
    if found is not None:
        region = found["region"]
    else:
        region = None  # the one of boto3's own chain
    return send_request(
        S3Request(f"opening the queue {queue_url}"),
        lambda: new_session().create_client("sqs", region_name=region),
    )


def check_queue_url(url: str) -> None:
    """Raise ConfigurationError unless this is the URL of a queue, without a login."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.path.strip("/") or "@" in parts.netloc:
        raise argument_error(
            "notifications (not shown, as it may contain a login) is not the URL of a queue",
            "one such as https://sqs.eu-central-1.amazonaws.com/123456789012/landing",
            argument="notifications",
        )


def _paths_of(body: str, bucket: str, prefix: str) -> tuple[str, ...]:
    """Return the paths of the objects that were created, without the prefix. Raises ValueError,
    which says why, for a message that is not about this place or can't be read.
    """
    try:
        found = [*_events(json.loads(body))]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is no notification of S3 ({type(error).__name__})") from error
    here = [key for created_in, key in found if created_in == bucket and key.startswith(prefix)]
    if found and not here:  # a message that names no new object is no error
        other, key = found[0]
        raise ValueError(f"it is about {key!r} in bucket {other!r}")
    # Consoles create empty objects as folders.
    return tuple(key.removeprefix(prefix) for key in here if not key.endswith("/"))


def _events(message: Any) -> Iterator[tuple[str, str]]:
    """Yield bucket and key of each object that was created."""
    if message.get("Type") == "Notification":  # from SNS
        message = json.loads(message["Message"])
    if message.get("Event") == "s3:TestEvent":
        return
    if "detail-type" in message:  # from EventBridge, with keys as they are
        if message["detail-type"] == "Object Created":
            detail = message["detail"]
            yield detail["bucket"]["name"], detail["object"]["key"]
        return
    for record in message["Records"]:  # from S3 itself, with encoded keys
        if record["eventName"].removeprefix("s3:").startswith("ObjectCreated"):
            at = record["s3"]
            yield at["bucket"]["name"], unquote_plus(at["object"]["key"])
