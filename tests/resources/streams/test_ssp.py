from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.streams import LakeStreams, open_system
from dagster_adjunct.resources.streams.system import SystemStreamPartition, register_system


def test_a_partition_is_written_and_read_back() -> None:
    ssp = SystemStreamPartition("lake", "enriched-flights", 3)
    assert str(ssp) == "lake.enriched-flights.3"
    assert SystemStreamPartition.parse(str(ssp)) == ssp


def test_partitions_sort_by_number_not_by_text() -> None:
    ssps = [SystemStreamPartition("lake", "flights", p) for p in (10, 2, 1)]
    assert [ssp.partition for ssp in sorted(ssps)] == [1, 2, 10]


@pytest.mark.parametrize(
    "text", ["flights.3", "lake.flights", "lake.a.b.3", "lake.flights.03", "lake.flights.-1", ""]
)
def test_what_is_no_partition_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        SystemStreamPartition.parse(text)
    assert repr(text) in str(caught.value) or "expected" in str(caught.value)


def test_a_stream_name_that_is_not_safe_is_refused() -> None:
    with pytest.raises(InvalidNameError) as failure:
        SystemStreamPartition("lake", "../up", 0)
    assert failure.value.facts == {"name": "../up"}


class Mine(LakeStreams):
    name = "mine"


class Latest(LakeStreams):
    name = "latest"
    default_offset: Any = "latest"


@pytest.mark.parametrize(("name", "factory"), [("other", Mine), ("latest", Latest)])
def test_a_system_whose_name_or_first_offset_is_wrong_is_refused(
    lake: Lake, name: str, factory: Any
) -> None:
    register_system(name, factory)
    with pytest.raises(ConfigurationError) as refused:
        open_system(lake, name)
    assert refused.value.system == name


def test_a_system_is_opened_by_its_name(lake: Lake) -> None:
    register_system("mine", Mine)
    register_system("mine", Mine)
    assert isinstance(open_system(lake, "lake"), LakeStreams)
    assert isinstance(open_system(lake, "mine"), LakeStreams)
    with pytest.raises(ConfigurationError) as caught:
        open_system(lake, "kafka2")
    assert caught.value.system == "kafka2"
    with pytest.raises(ConfigurationError) as caught:
        register_system("mine", lambda lake: LakeStreams(lake))
    assert caught.value.system == "mine"
