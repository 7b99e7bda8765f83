"""Device ranges such as ``gpu[0-3,6]``: parsing, formatting and errors."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UsageError
from rollgym.devices.inventory import cpu_cluster, gpu_cluster
from rollgym.devices.ranges import format_range, parse_range
from rollgym.devices.types import Cluster, Device

TWO_NODES = gpu_cluster(nodes=2, gpus=4, model="H100")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("gpu[0]", [0]),
        ("gpu[0-3]", [0, 1, 2, 3]),
        ("gpu[0-1,6]", [0, 1, 6]),
        (" gpu [ 7 , 0 - 1 ] ", [0, 1, 7]),
    ],
)
def test_ranges_name_devices_over_the_whole_cluster(text: str, numbers: list[int]) -> None:
    assert parse_range(text, TWO_NODES) == tuple(Device(number // 4, number % 4) for number in numbers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu[0-8]", "device 8 does not exist; there are 8, numbered gpu[0-7]"),
        ("gpu[999999999]", "device 999999999 does not exist"),
        ("gpu[3-1]", "goes backwards"),
        ("gpu[0,0-2]", "device 0 twice"),
        ("gpu[]", "a number is missing"),
        ("gpu[1,,2]", "a number is missing"),
        ("gpu[1-2-3]", "'1-2-3' is not a number or range"),
        ("cpu[0]", "device 0 is a gpu"),
        ("0-3", "is not a device range"),
        ("list(range(4))", "is not a device range"),
        ("__import__('os').system('true')", "is not a device range"),
        ("gpu[٣]", "is not a device range"),
    ],
)
def test_invalid_ranges_are_rejected_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_range(text, TWO_NODES, "devices.actor_train")
    assert words in str(caught.value)
    assert str(caught.value).startswith("devices.actor_train is ")


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 7), min_size=1))
def test_formatted_ranges_parse_back(numbers: set[int]) -> None:
    every = TWO_NODES.devices
    chosen = tuple(every[number] for number in sorted(numbers))
    assert parse_range(format_range(chosen, TWO_NODES), TWO_NODES) == chosen


@settings(max_examples=50, deadline=None)
@given(st.text("gpcu[]0123456789,- \n", max_size=20))
def test_no_text_raises_anything_but_a_usage_error(text: str) -> None:
    cluster: Cluster = cpu_cluster(2)
    with contextlib.suppress(UsageError):
        assert set(parse_range(text, cluster)) <= set(cluster.devices)
