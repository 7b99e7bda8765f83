"""Spaces as text: every kind there and back, and nonsense refused in a sentence."""

import math

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.adapters.spaces import (
    BadAction,
    action_text,
    describe,
    from_plain,
    observation_text,
    parse_action,
    short_number,
    to_plain,
)
from rollgym.core.env import TextSpace


def array(*numbers, dtype=np.float32):
    return np.array(numbers, dtype)


SPACES = {
    "discrete": spaces.Discrete(5),
    "discrete from -3": spaces.Discrete(7, start=-3),
    "discrete, 8 bits": spaces.Discrete(3, dtype=np.uint8),
    "multi discrete": spaces.MultiDiscrete([3, 1, 4]),
    "multi discrete from -1": spaces.MultiDiscrete([3, 5], start=[-1, 10]),
    "multi discrete, 2-D": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi binary": spaces.MultiBinary(4),
    "multi binary, 2-D": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-2, 2, (3,)),
    "box of one": spaces.Box(-2, 2, (1,)),
    "box without shape": spaces.Box(-0.7, 0.7, ()),
    "box, 2-D": spaces.Box(0, 1, (2, 3), np.float64),
    "box, 3-D of one": spaces.Box(0, 1, (1, 1, 1)),
    "box without bounds": spaces.Box(-np.inf, np.inf, (2,)),
    "box, half bounded": spaces.Box(array(0, -np.inf), array(np.inf, 3)),
    "box, 16 bits": spaces.Box(-1, 1, (3,), np.float16),
    "box of bytes": spaces.Box(0, 255, (2, 2), np.uint8),
    "box of whole numbers": spaces.Box(-5, 5, (2,), np.int64),
    "box of truth": spaces.Box(0, 1, (3,), np.bool_),
    "box, tiny": spaces.Box(-1e-30, 1e-30, (2,)),
    "box, empty": spaces.Box(0, 1, (0,)),
    "box, many": spaces.Box(-1, 1, (1500,)),
    "text": spaces.Text(8),
    "text with anything": spaces.Text(6, min_length=0, charset="ab \n\t\"'`{}[]é√"),
    "our text": TextSpace(50),
    "dict": spaces.Dict(go=spaces.Discrete(3), force=spaces.Box(-1, 1, (2,)), say=spaces.Text(4)),
    "dict in dict": spaces.Dict(a=spaces.Dict(b=spaces.Tuple([spaces.Discrete(2)]))),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2), spaces.Text(3)]),
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "sequence, stacked": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "sequence of tuples, stacked": spaces.Sequence(
        spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]), stack=True
    ),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(4)),
    "graph without edges": spaces.Graph(spaces.Discrete(3), None),
}
quick = settings(max_examples=25, deadline=None)
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def same(space, one, other):
    return data_equivalence(to_plain(space, one), to_plain(space, other), exact=True)


@every_space
@quick
@given(seed=st.integers(0, 2**31 - 1))
def test_an_action_survives_being_written_and_parsed(space, seed):
    space.seed(seed)
    value = space.sample()
    back = parse_action(space, action_text(space, value))
    assert space.contains(back)
    assert same(space, back, value)


@every_space
@quick
@given(seed=st.integers(0, 2**31 - 1))
def test_plain_data_is_json_and_stands_for_the_value(space, seed):
    space.seed(seed)
    value = space.sample()
    back = from_plain(space, to_plain(space, value))
    assert space.contains(back)
    assert same(space, back, value)


@every_space
@quick
@given(text=st.text())
def test_any_text_is_an_action_or_refused(space, text):
    try:
        value = parse_action(space, text)
    except BadAction:
        return
    assert space.contains(value)


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "go"]), inner),
    max_leaves=6,
)


@every_space
@quick
@given(data=JSONISH)
def test_any_data_is_a_value_or_refused(space, data):
    try:
        value = from_plain(space, data)
    except BadAction:
        return
    assert space.contains(value)


@every_space
def test_every_space_is_described_and_observed(space):
    space.seed(5)
    assert describe(space)
    assert isinstance(observation_text(space, space.sample()), str)


def test_a_stacked_sequence_and_a_graph_may_be_empty():
    stacked = SPACES["sequence, stacked"]
    assert parse_action(stacked, "[]").shape == (0, 2)
    graph = parse_action(SPACES["graph"], '{"nodes": [], "edges": [], "edge_links": []}')
    assert graph.nodes.shape == (0, 2)
    assert graph.edges is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (7, "7"),
        (123456789, "123456789"),
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (-12.3456, "-12.35"),
        (999.96, "1000"),
        (123456.7, "123457"),
        (0.0000123456, "1.235e-05"),
        (1.5e20, "1.5e+20"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_shortened_to_four_significant_digits(number, text):
    assert short_number(number) == text


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(48), np.int64(36), "36"),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 3]), "[2, 3]"),
        (spaces.MultiBinary(3), array(1, 0, 1, dtype=np.int8), "[1, 0, 1]"),
        (spaces.Box(-1, 1, (2,)), array(0.1, -0.123456), "[0.1, -0.1235]"),
        (spaces.Box(-1, 1, ()), np.float32(0.5), "0.5"),
        (spaces.Box(0, 9, (2, 2), np.uint8), np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (spaces.Text(9), "two words", "two words"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), (1, "abc"), "item 1: 1\nitem 2: abc"),
        (spaces.Sequence(spaces.Discrete(3)), (1, 2), "[1, 2]"),
        (spaces.OneOf([spaces.Discrete(3), spaces.Text(3)]), (1, "abc"), '[1, "abc"]'),
    ],
)
def test_observations_are_short_regular_text(space, value, text):
    assert observation_text(space, value) == text


def test_a_dict_has_a_line_for_each_key_in_the_order_of_the_space():
    space = spaces.Dict(
        {
            "where": spaces.Box(0, 9, (2,), np.int32),
            "goal": spaces.Text(20, charset="go \n"),
            "bag": spaces.Dict(n=spaces.Discrete(3)),
        }
    )
    value = {"where": np.array([1, 2], np.int32), "goal": "go on", "bag": {"n": 2}}
    assert observation_text(space, value) == 'bag: {"n": 2}\ngoal: go on\nwhere: [1, 2]'
    assert 'goal: "go\\non"\n' in observation_text(space, {**value, "goal": "go\non"})


def test_a_graph_is_observed_as_json():
    graph = spaces.GraphInstance(array([0.5], [1]), np.array([2]), np.array([[0, 1]]))
    text = observation_text(spaces.Graph(spaces.Box(0, 1, (1,)), spaces.Discrete(3)), graph)
    assert text == '{"nodes": [[0.5], [1]], "edges": [2], "edge_links": [[0, 1]]}'


def test_a_large_array_is_summed_up():
    space = spaces.Box(0, 255, (20, 30, 3), np.uint8)
    image = np.zeros(space.shape, np.uint8)
    image[0, 0, 0] = 180
    # 180 / 1800 numbers = 0.1
    assert observation_text(space, image) == "array of 20x30x3 numbers, least 0, greatest 180, mean 0.1"
    assert observation_text(spaces.Box(0, 1, (1000,)), np.zeros(1000, np.float32)).startswith("[0, 0,")


NAMES = {0: "up", 1: "Turn  right"}


@pytest.mark.parametrize(
    ("text", "action"),
    [("0", 0), (" 1\n", 1), ("2", 2), ("2.0", 2), ("UP", 0), ("`up`", 0), ('"turn right"', 1), ("+2", 2)],
)
def test_a_discrete_action_is_a_number_or_a_name(text, action):
    assert parse_action(spaces.Discrete(3), text, NAMES) == action


@pytest.mark.parametrize(
    "text", ["3", "-1", "1.5", "up up", "", "true", "[1]", "1_0", "٢", "9" * 5000, "nan"]
)
def test_anything_else_is_not_a_discrete_action(text):
    with pytest.raises(BadAction, match="one of up, Turn  right or a whole number from 0 to 2, not"):
        parse_action(spaces.Discrete(3), text, NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "0.5 -1",
        "0.5, -1",
        "[0.5, -1]",
        "[0.5 -1]",
        "(0.5,-1)",
        "`.5;-1.0`",
        "5e-1\n-1",
        "```json\n[0.5, -1]\n```",
    ],
)
def test_numbers_may_be_separated_in_many_ways(text):
    assert parse_action(spaces.Box(-1, 1, (2,)), text).tolist() == [0.5, -1]


def test_a_box_keeps_its_type_and_its_bounds():
    space = spaces.Box(-0.7, 0.7, (1,))
    assert parse_action(space, "0.7").dtype == np.float32
    assert action_text(space, array(0.1)) == "0.1"
    for text in ("0.71", "-0.8", "1e39", "1e999", "NaN", "Infinity", "true", "9" * 350):
        with pytest.raises(BadAction, match=r"The action must be a number from -0\.7 to 0\.7, not "):
            parse_action(space, text)


def test_a_refusal_names_the_number_that_is_wrong():
    with pytest.raises(
        BadAction, match=r"^The action \(number 2 of 2\) must be a number from -1 to 1, not 5\.$"
    ):
        parse_action(spaces.Box(-1, 1, (2,)), "0 5")
    with pytest.raises(BadAction, match=r"must be 2 numbers, each from -1 to 1, not \[1, 2, 3\]\.$"):
        parse_action(spaces.Box(-1, 1, (2,)), "1 2 3")
    with pytest.raises(BadAction, match="must be a whole number from 0 to 1, not 0.5"):
        parse_action(spaces.MultiBinary(2), "0.5 1")


def test_a_flat_list_will_do_for_a_grid_but_a_crooked_one_will_not():
    space = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))
    assert parse_action(space, "1 2 3 4").tolist() == [[1, 2], [3, 4]]
    assert parse_action(space, "[[1, 2], [3, 4]]").tolist() == [[1, 2], [3, 4]]
    for text in ("[[1, 2], 3, 4]", "[[1, 2, 3], [4]]", "[[[1, 2], [3, 4]]]", "[[1, 2]]"):
        with pytest.raises(BadAction, match="2x2 whole numbers"):
            parse_action(space, text)


def test_truth_values_stand_for_bits_only():
    assert parse_action(spaces.MultiBinary(2), "[true, false]").tolist() == [1, 0]
    with pytest.raises(BadAction):
        parse_action(spaces.Box(0, 5, (2,)), "[true, false]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"go": 1}', r'must be a JSON object {"go": <a whole number from 0 to 2>, "force": <2 '),
        ('{"go": 3, "force": [0, 0], "say": "x"}', '"go" must be a whole number from 0 to 2, not 3'),
        ('{"go": 1, "force": [0, 2], "say": "x"}', r'"force" \(number 2 of 2\) must be a number from -1'),
        ('{"go": 1, "force": [0, 0], "say": "x", "and": 1}', "must be a JSON object"),
        ('{"go": 1, "force": [0, 0], "say": "xxxxx"}', '"say" must be text of 1 to 4 characters'),
        ("jump", 'not "jump"'),
        ("[" * 30000, "nested too deeply"),
    ],
)
def test_a_dict_action_is_a_json_object_with_just_its_keys(text, message):
    with pytest.raises(BadAction, match=message):
        parse_action(SPACES["dict"], text)


def test_text_is_taken_as_it_is_where_it_can_be():
    space = spaces.Text(6, charset="ab '")
    assert parse_action(space, " 'ab' ") == " 'ab' "
    assert parse_action(spaces.Text(6), ' "ab" ') == "ab"
    assert parse_action(spaces.Text(6), "12") == "12"


def test_a_third_party_space_accepts_what_it_contains():
    class Even(spaces.Space):
        def contains(self, x):
            return x % 2 == 0

    assert parse_action(Even(), "4") == 4
    for text in ("3", '{"a": 1}'):
        with pytest.raises(BadAction, match="must be a value of"):
            parse_action(Even(), text)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Discrete(4, start=1), "a whole number from 1 to 4"),
        (spaces.Box(3, 4, (2,)), "2 numbers, each from 3 to 4"),
        (spaces.Box(0, np.inf, (1,)), "a number of at least 0"),
        (SPACES["box, half bounded"], "2 numbers, in this order: of at least 0, of at most 3"),
        (SPACES["box without bounds"], "2 numbers, each of any size"),
        (spaces.Box(0, 255, (9, 9, 3), np.uint8), "9x9x3 whole numbers in nested lists, each from 0 to 255"),
        (
            spaces.MultiDiscrete([2] * 19 + [3]),
            "20 whole numbers, each from 0 to 2 (some in a narrower range)",
        ),
        (spaces.Text(5), "text of 1 to 5 characters (letters and digits)"),
        (spaces.OneOf([spaces.Discrete(2)]), "a JSON list: [0, <a whole number from 0 to 1>]"),
    ],
)
def test_spaces_are_described_in_words(space, text):
    assert describe(space) == text
