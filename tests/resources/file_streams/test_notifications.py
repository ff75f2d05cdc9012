"""Files of which a bucket notifies an SQS queue, on moto's server, which has both."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any
from urllib.parse import quote_plus

import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import notifications
from dagster_adjunct.resources.file_streams.notifications import Notifications
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.file_streams.landing import S3Landing, clicks, lines, look, waiting
from tests.servers.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server

pytestmark = pytest.mark.server


class Queue:
    """A queue of a bucket's notifications."""

    def __init__(self, server: S3Server, name: str) -> None:
        import boto3

        self.client: Any = boto3.session.Session().client(
            "sqs",
            endpoint_url=server.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        self.url: str = self.client.create_queue(
            QueueName=name, Attributes={"VisibilityTimeout": "0"}
        )["QueueUrl"]

    @property
    def arn(self) -> str:
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        return str(found["Attributes"]["QueueArn"])

    def send(self, body: object) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.client.send_message(QueueUrl=self.url, MessageBody=text)

    def count(self) -> int:
        found = self.client.get_queue_attributes(
            QueueUrl=self.url, AttributeNames=["ApproximateNumberOfMessages"]
        )
        return int(found["Attributes"]["ApproximateNumberOfMessages"])

    def empty(self) -> None:
        while found := self.client.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10).get(
            "Messages"
        ):
            for one in found:
                self.client.delete_message(QueueUrl=self.url, ReceiptHandle=one["ReceiptHandle"])


@pytest.fixture
def place(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> tuple[S3Landing, Queue]:
    """A bucket that notifies a queue of what is created and deleted."""
    moto_s3.set_in(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", moto_s3.endpoint)
    monkeypatch.setattr(notifications, "_WAIT_SECONDS", 0)
    landing = S3Landing(moto_s3.client(), moto_s3.bucket())
    queue = Queue(moto_s3, f"q-{landing.bucket}")
    moto_s3.client().put_bucket_notification_configuration(
        Bucket=landing.bucket,
        NotificationConfiguration={
            "QueueConfigurations": [
                {"QueueArn": queue.arn, "Events": ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]}
            ]
        },
    )
    queue.empty()
    return landing, queue


def created(bucket: str, key: str, event: str = "ObjectCreated:Put") -> dict[str, Any]:
    at = {"bucket": {"name": bucket}, "object": {"key": quote_plus(key)}}
    return {"Records": [{"eventName": event, "s3": at}]}


def by_sns(message: object) -> dict[str, Any]:
    return {"Type": "Notification", "Message": json.dumps(message)}


def by_event_bridge(bucket: str, key: str, kind: str = "Object Created") -> dict[str, Any]:
    return {"detail-type": kind, "detail": {"bucket": {"name": bucket}, "object": {"key": key}}}


def test_a_look_finds_what_the_queue_was_notified_of(
    place: tuple[S3Landing, Queue], lake: Lake
) -> None:
    landing, queue = place
    landing.put("before", lines(0))
    queue.empty()
    system = clicks(landing, lake, notifications=queue.url)
    assert look(system) == [0]
    for number, name in enumerate(("a", "größe & co+1", "d=1/b"), 1):
        landing.put(name, lines(number))
    assert queue.count() == 3
    assert sorted(look(system)) == [0, 1, 2, 3]
    assert queue.count() == 0
    assert sorted(look(system)) == [0, 1, 2, 3]


def test_repeated_unordered_and_other_messages_do_no_harm(
    place: tuple[S3Landing, Queue], lake: Lake
) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=queue.url)
    assert look(system) == []
    landing.put("a", lines(1))
    landing.put("gone", lines(9))
    landing.delete("gone")
    queue.empty()
    key, bucket = "in coming/a", landing.bucket
    used = [
        created(bucket, "in coming/a", "ObjectRemoved:Delete"),
        created(bucket, key),
        created(bucket, key, "s3:ObjectCreated:CompleteMultipartUpload"),
        by_sns(created(bucket, key)),
        by_event_bridge(bucket, key),
        by_event_bridge(bucket, key, "Object Deleted"),
        created(bucket, "in coming/gone"),
        created(bucket, "in coming/folder/"),
        {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": bucket},
    ]
    for message in used:
        queue.send(message)
    assert look(system) == [1]
    assert queue.count() == 0
    for message in used:
        queue.send(message)
    assert look(system) == [1]
    assert queue.count() == 0


def test_messages_that_are_not_ours_stay_in_the_queue(
    place: tuple[S3Landing, Queue], lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, queue = place
    queue.client.set_queue_attributes(QueueUrl=queue.url, Attributes={"VisibilityTimeout": "30"})
    system = clicks(landing, lake, notifications=queue.url)
    look(system)
    landing.put("a", lines(1))
    foreign = [
        "no JSON {",
        "[]",
        {"Records": [{"eventName": "ObjectCreated:Put"}]},
        {"Type": "Notification", "Message": "text"},
        created("another", "in coming/b"),
        created(landing.bucket, "elsewhere/b"),
    ]
    for message in foreign:
        queue.send(message)
    assert look(system) == [1]
    left = queue.client.get_queue_attributes(
        QueueUrl=queue.url, AttributeNames=["ApproximateNumberOfMessagesNotVisible"]
    )
    assert left["Attributes"]["ApproximateNumberOfMessagesNotVisible"] == str(len(foreign))


def test_a_full_listing_finds_what_notifications_lost(
    place: tuple[S3Landing, Queue], lake: Lake
) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=queue.url)
    look(system)
    landing.put("a", lines(1))
    queue.empty()
    assert look(system) == []
    landing.put("b", lines(2))
    assert look(system) == [2]
    assert look(system, all_files=True) == [2, 1]
    assert look(system) == [2, 1]


def test_messages_are_deleted_only_after_the_commit(place: tuple[S3Landing, Queue]) -> None:
    landing, queue = place
    inner = InMemoryStore()
    system = clicks(landing, lake_in(inner), notifications=queue.url)
    look(system)
    landing.put("a", lines(1))
    count = 0
    for nth in range(1, 20):
        store = FaultyStore(inner, [Fault("put_if_match", nth, "crash-before")])
        system = clicks(landing, lake_in(store), notifications=queue.url)
        try:
            system.admit("clicks")
        except Crash:
            count += 1
            assert queue.count() == 1
        else:
            break
    assert count == 1
    assert queue.count() == 0
    system = clicks(landing, lake_in(inner), notifications=queue.url)
    assert look(system) == [1]


def test_a_message_comes_again_if_it_can_not_be_deleted(
    place: tuple[S3Landing, Queue], lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=queue.url)
    look(system)
    landing.put("a", lines(1))

    def fail(*_: object, **__: object) -> None:
        raise errors.StoreUnavailableError("no answer", "Run it again.")

    ask = Notifications._ask

    def asked(self: Notifications, action: str, send: Callable[[], Any]) -> Any:
        if action.startswith("deleting"):
            fail()
        return ask(self, action, send)

    with monkeypatch.context() as patched:
        patched.setattr(Notifications, "_ask", asked)
        assert look(system) == [1]
    assert queue.count() == 1
    assert look(system) == [1]
    assert queue.count() == 0


def test_the_message_of_a_file_that_waits_comes_again(
    place: tuple[S3Landing, Queue], lake: Lake
) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=queue.url, marker="*.done")
    look(system)
    landing.put("a", lines(1))
    landing.put("b", lines(2))
    landing.put("b.done", b"")
    queue_url = system.declaration("clicks").listing.notifications  # type: ignore[attr-defined]
    assert queue_url == queue.url
    queue.client.set_queue_attributes(QueueUrl=queue.url, Attributes={"VisibilityTimeout": "1"})
    assert look(system) == [2]
    assert waiting(system) <= {"a"}
    landing.put("a.done", b"")
    found = [2]
    for _ in range(20):
        found = look(system)
        if found == [2, 1]:
            break
        queue.client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])
        import time

        time.sleep(0.2)
    assert found == [2, 1]


def test_a_queue_that_is_not_there_is_an_error_by_name(
    place: tuple[S3Landing, Queue], lake: Lake
) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=f"{queue.url}-x")
    system.admit("clicks")
    with pytest.raises(errors.ConfigurationError, match="there is no queue") as caught:
        system.admit("clicks")
    assert caught.value.argument == "notifications"


def test_what_is_pickled_has_no_secrets(place: tuple[S3Landing, Queue], lake: Lake) -> None:
    landing, queue = place
    system = clicks(landing, lake, notifications=queue.url)
    look(system)
    data = pickle.dumps(system.declaration("clicks").feed(lake))
    assert SECRET_KEY.encode() not in data
    state = system.file_log("clicks").read()
    assert state is not None
    assert SECRET_KEY not in state.model_dump_json()
