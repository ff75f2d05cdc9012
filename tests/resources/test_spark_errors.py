"""Errors on their way through Spark, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ManifestMismatchError,
    PermanentError,
    PlanningError,
    StoreUnavailableError,
    TableAccessError,
    TransientError,
)
from dagster_adjunct.resources.objects.s3_store import StoreBusyError, UploadGoneError
from dagster_adjunct.resources.spark.tasks import (
    decode_error,
    encode_task_errors,
    find_adjunct_error,
)


class OwnError(TableAccessError):
    """As a table function of a user's may raise it."""


@pytest.mark.parametrize(
    ("raised", "kind", "base"),
    [
        (StoreBusyError, StoreUnavailableError, TransientError),
        (UploadGoneError, StoreUnavailableError, TransientError),
        (OwnError, TableAccessError, PermanentError),
    ],
)
def test_an_error_of_a_task_stays_transient_or_permanent_whatever_its_own_class(
    raised: type[AdjunctError], kind: type[AdjunctError], base: type[AdjunctError]
) -> None:
    def task() -> Iterator[int]:
        yield 1
        raise raised("it was slow.", "Run it again.")

    with pytest.raises(RuntimeError) as reported:
        list(encode_task_errors(task()))
    translated = decode_error(f"org.apache.spark.SparkException: Job aborted: {reported.value}")
    assert translated is not None
    assert (type(translated), translated.problem, translated.next_step) == (
        kind,
        "it was slow.",
        "Run it again.",
    )
    assert isinstance(translated, base)


class Py4JJavaError(Exception):
    """As py4j raises what the JVM raised, which pyspark knows no class for."""

    __module__ = "py4j.protocol"


FILE = "s3a://bucket/lake/streams/orders/data/a/part-00000.zstd.parquet"
READ = (
    "An error occurred while calling o336.collectToPython.\n: org.apache.spark.SparkException:"
    f" [FAILED_READ_FILE.NO_HINT] Encountered error while reading file {FILE}.  SQLSTATE:"
    " KD001\n\tat org.apache.spark.A.b(A.scala:1)\n"
)
CUT = "Premature end of Content-Length delimited message body (expected: 4,841; received: 2,420)"


@pytest.mark.parametrize(
    "cause",
    [
        f"org.apache.http.ConnectionClosedException: {CUT}",
        "java.net.SocketTimeoutException: Read timed out",
        "org.apache.http.NoHttpResponseException: store:9000 failed to respond",
        "org.apache.hadoop.fs.s3a.AWSStatus500Exception: GET on s3a://x: 503 Slow Down",
        (
            "software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP"
            " request: refused"
        ),
    ],
)
def test_a_read_that_the_network_broke_off_is_transient_and_names_the_file(cause: str) -> None:
    inner = "Caused by: java.lang.RuntimeException: wrapped\n\tat a.B.c(B.java:1)\n"
    translated = find_adjunct_error(
        Py4JJavaError(f"{READ}{inner}Caused by: {cause}\n\tat a.B.c(B.java:1)\n")
    )
    assert isinstance(translated, StoreUnavailableError)
    assert (
        translated.problem == f"Spark's read of {FILE} was interrupted: {cause.split(': ', 1)[1]}."
    )
    assert translated.url == FILE


def test_a_damaged_file_and_missing_credentials_are_not_taken_for_a_broken_network() -> None:
    damaged = find_adjunct_error(
        Py4JJavaError(f"{READ}Caused by: java.io.EOFException: too short\n\tat a.B.c(B.java:1)\n")
    )
    assert isinstance(damaged, ManifestMismatchError)
    assert damaged.url == FILE
    message = "software.amazon.awssdk.core.exception.SdkClientException: Unable to load credentials"
    assert find_adjunct_error(Py4JJavaError(f"{READ}Caused by: {message}\n")) is None


@pytest.mark.parametrize(
    "matched", ["java.io.EOFException", "java.net.SocketException: Connection reset"]
)
def test_a_worker_that_was_killed_is_transient_and_is_no_fault_of_the_store(matched: str) -> None:
    lost = (
        "An error occurred while calling o217.collectToPython.\n: org.apache.spark.SparkException:"
        " Job aborted due to stage failure: Task 1 in stage 1.0 failed 1 times, most recent"
        " failure: Lost task 1.0 in stage 1.0 (TID 5) (localhost executor driver):"
        " org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider"
        f" setting 'x' to 'true'.\n\tat a.B.c(B.java:1)\nCaused by: {matched}\n\tat a.B.d(B.java:2)\n"
    )
    translated = find_adjunct_error(Py4JJavaError(lost))
    assert type(translated) is TransientError
    assert translated.problem.startswith("a Python worker of Spark ended in the middle of its task")


@pytest.mark.parametrize(
    "before",
    [": ", ": org.apache.spark.SparkException: Job aborted\n\tat a.B.c(B.java:1)\nCaused by: "],
)
def test_a_plan_that_is_too_deep_for_the_jvm_says_what_to_do(before: str) -> None:
    message = (
        f"An error occurred while calling o9.select.\n{before}java.lang.StackOverflowError\n\tat"
        " a.B.c(B.java:1)\n"
    )
    translated = find_adjunct_error(Py4JJavaError(message))
    assert isinstance(translated, PlanningError)
    assert "nested too deeply" in translated.problem
    assert (
        "-Xss128m in spark.driver.extraJavaOptions and spark.executor.extraJavaOptions"
        in translated.next_step
    )
    assert (
        find_adjunct_error(
            Py4JJavaError(
                message.replace("java.lang.StackOverflowError", "a.B: java.lang.StackOver")
            )
        )
        is None
    )


_REFUSED = (
    ": org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading"
    " file s3a://b/d/rows.parquet.  SQLSTATE: KD001\n\tat org.apache.spark.Foo(Foo.java:1)\nCaused"
    " by: {kind}: getFileStatus on s3a://b/d/rows.parquet:"
    " software.amazon.awssdk.services.s3.model.S3Exception: {text} (Service: S3, Status Code:"
    " {status}, Request ID: null):{code}\n\tat"
    " org.apache.hadoop.fs.s3a.S3AUtils.translateException(S3AUtils.java:271)\n"
)
_S3A_BAD = "org.apache.hadoop.fs.s3a.AWSBadRequestException"
_S3A_DENIED = "java.nio.file.AccessDeniedException: s3a://b/d/rows.parquet"


@pytest.mark.parametrize(
    ("kind", "text", "status", "code"),
    [
        (_S3A_BAD, "The provided token has expired.", 400, "ExpiredToken"),
        (_S3A_DENIED, "The difference is too large.", 403, "RequestTimeTooSkewed"),
        (
            _S3A_BAD,
            "Bad Request",
            400,
            "null: Bad Request (Service: S3, Status Code: 400, Request ID: null)",
        ),
        (_S3A_DENIED, "Forbidden", 403, "null"),
    ],
)
def test_expired_credentials_of_spark_are_transient(
    kind: str, text: str, status: int, code: str
) -> None:
    found = find_adjunct_error(
        Py4JJavaError(_REFUSED.format(kind=kind, text=text, status=status, code=code))
    )
    assert isinstance(found, StoreUnavailableError)
    assert f"answered {status} " in found.problem
    assert "null" not in found.problem
    assert "null" in code or code in found.problem


def test_what_spark_may_not_read_is_no_expired_credential() -> None:
    text = _REFUSED.format(kind=_S3A_DENIED, text="Access Denied", status=403, code="AccessDenied")
    assert find_adjunct_error(Py4JJavaError(text)) is None
