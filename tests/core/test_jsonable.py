"""Anything an environment says becomes plain JSON values, or is refused with its place."""

import enum
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.serialization import clean_text, jsonable


@pytest.mark.parametrize("sample", ["", "plain", "naïve √ 🙂 漢", "\x00\n\r\u2028"])
def test_cleaning_leaves_proper_text_alone(sample):
    assert clean_text(sample) == sample


def test_cleaning_marks_lone_surrogates():
    assert set(clean_text("\ud800")) == {"\ufffd"}
    assert clean_text("a\udc80b").encode().startswith(b"a")


class Color(str, enum.Enum):  # noqa: UP042
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.uint8(255), 255),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(7), 7),
        (np.array([1.0, math.nan]), [1.0, None]),
        ((1, (2, "x")), [1, [2, "x"]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", 10, "a", 2}), ["a", "b", 10, 2]),
        (math.nan, None),
        (-math.inf, None),
        (2**63 - 1, 2**63 - 1),
        (2**63, "9223372036854775808"),
        (-(2**63), -(2**63)),
        (-(2**63) - 1, "-9223372036854775809"),
        (
            {1: {"a": (None, True)}, np.int64(2): "\ud800"},
            {"1": {"a": [None, True]}, "2": clean_text("\ud800")},
        ),
        (Color.RED, "red"),
        (Level.HIGH, 3),
    ],
)
def test_values_become_plain(value, expected):
    result = jsonable(value)
    assert repr(result) == repr(expected)
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("value", [object(), b"x", 1j, np.clongdouble(1), print])
def test_other_values_are_refused_with_their_place_or_named_by_type(value):
    assert jsonable([0, value], lenient=True) == [0, f"<{type(value).__name__}>"]
    with pytest.raises(TypeError, match=r"facts\['a'\]\[1\] is a \w+, which JSON cannot represent"):
        jsonable({"a": [0, value]}, "facts")


def test_leniency_replaces_only_what_it_must():
    assert jsonable({"a": [1, b"x"], "b": {object}}, lenient=True) == {"a": [1, "<bytes>"], "b": ["<type>"]}


any_text = st.text(st.characters(codec=None))  # lone surrogates too
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | any_text, inner, max_size=3)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(anything)
def test_plain_values_stay_as_they_are(value):
    once = jsonable(value, lenient=True)
    assert repr(jsonable(once)) == repr(once)
    assert json.loads(json.dumps(once)) == once
