"""What every system checks of what a read or an append is given."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError, ProducerConflictError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_NAME_LENGTH = 300


def one_stream(system: str, ssps: Iterable[SystemStreamPartition]) -> str:
    """Return the stream to which all these partitions belong."""
    streams = sorted({ssp.qualified_stream for ssp in ssps})
    if len(streams) != 1 or not streams[0].startswith(f"{system}."):
        raise ConfigurationError(
            f"a read names the streams {', '.join(streams) or '(none)'}: expected one of system {system!r}.",
            "Read each stream by itself; their columns differ.",
            system=system,
        )
    return split_stream_name(streams[0])[1]


def no_partition(ssp: SystemStreamPartition, count: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{ssp} does not exist: the stream has {count} partitions, 0 to {count - 1}.",
        "Check the partition.",
        stream=ssp.qualified_stream,
        partition=ssp.partition,
    )


def check_epochs(epochs: str) -> bool:
    """Return whether the latest results are asked for."""
    if epochs not in ("all", "latest"):
        raise ConfigurationError(
            f"epochs={epochs!r}: expected 'all' or 'latest'.", "Choose one of the two.", argument="epochs"
        )
    return epochs == "latest"


def check_producer(producer: str, sequence: int) -> None:
    """Refuse what can't be remembered exactly."""
    if not isinstance(producer, str) or not 0 < len(producer) <= _NAME_LENGTH:
        raise ConfigurationError(
            f"producer {producer!r} is no name: expected a text of 1 to {_NAME_LENGTH} characters.",
            "Name what appends, the same in every retry: an application's output, an import.",
            argument="producer",
        )
    if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < 0:
        raise ConfigurationError(
            f"sequence {sequence!r} of producer {producer!r} is not an integer from 0.",
            "Count the producer's appends, with the same number in every retry.",
            argument="sequence",
        )


def counted_anew(stream: str, producer: str, sequence: int, newest: int) -> ProducerConflictError:
    """Return the refusal of a sequence far below the newest one of its producer."""
    return ProducerConflictError(
        f"sequence {sequence} of producer {producer!r} in {stream} is below those that are still known: the newest one "
        f"is {newest}.",
        f"Nothing was added. Give new records the sequence {newest + 1}, or a producer of their own where its counter "
        "began again. What was appended before and is repeated so late is in already.",
        stream=stream,
        producer=producer,
        sequence=sequence,
        newest=newest,
    )
