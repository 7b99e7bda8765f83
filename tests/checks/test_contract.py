import math

import numpy as np
import pytest

from rollgym.checks.contract import require_contract
from rollgym.checks.report import RuleFailed
from rollgym.checks.rollout import Transition, difference, plain, short
from rollgym.core.env import TextSpace

FINE = {"success": False, "valid": True}


def transition(**changes):
    return Transition(**{"turn": 1, "action": "up", "observation": "here", "info": FINE, **changes})


def check(now):
    require_contract(now, TextSpace(10), (0.0, 1.0))


@pytest.mark.parametrize(
    "now",
    [
        transition(),
        transition(action=None),
        transition(reward=1, terminated=True),
        transition(reward=1.0 + 1e-12),
        transition(info={**FINE, "success": None}),
        transition(info={**FINE, "board": [[1, None], {"a": "ß"}], "actions": ["up"]}),
    ],
)
def test_a_proper_transition_is_accepted(now):
    check(now)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation": 3}, "returns str"),
        ({"observation": "x" * 11}, "shorten it"),
        ({"observation": "\ud800"}, "lone surrogates"),
        ({"reward": "1"}, "make it a float"),
        ({"reward": True}, "make it a float"),
        ({"reward": np.float32(0.5)}, "make it a float"),
        ({"reward": math.inf}, "finite"),
        ({"reward": 1.1}, "reward_range"),
        ({"reward": -0.1}, "reward_range"),
        ({"terminated": 1}, "terminated=1"),
        ({"truncated": np.True_}, "truncated="),
        ({"info": None}, "must be a dict"),
        ({"info": {"valid": True}}, "info['success']='missing'"),
        ({"info": {**FINE, "success": "yes"}}, "info['success']='yes'"),
        ({"info": {"success": True}}, "info['valid']='missing'"),
        ({"info": {**FINE, "n": np.int64(3)}}, "info['n']"),
        ({"info": {**FINE, "n": math.nan}}, "info['n']"),
        ({"info": {**FINE, "n": (1, 2)}}, "info['n']"),
        ({"info": {**FINE, "n": {1: 2}}}, "info['n']"),
        ({"info": {**FINE, "n": "\udfff"}}, "info['n']"),
        ({"info": {**FINE, "actions": "up"}}, "info['actions']"),
        ({"info": {**FINE, "actions": [1]}}, "info['actions']"),
    ],
)
def test_a_breach_is_named(changes, words):
    with pytest.raises(RuleFailed) as caught:
        check(transition(**changes))
    assert words in str(caught.value)
    assert str(caught.value).startswith("step('up') at turn 1")


START = {"observation": "a", "info": {"n": 1}}
TURN = {"action": "up", "observation": "b", "info": {"n": 2}, "reward": 0.0}


def test_equal_traces_do_not_differ():
    assert difference([START, TURN], [dict(START), dict(TURN)]) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([{**START, "observation": "c"}, TURN], "at the start, observation was 'a' once and 'c'"),
        ([START, {**TURN, "reward": 1.0}], "at turn 1, reward was 0.0 once and 1.0"),
        ([START, {**TURN, "info": {"n": 3}}], "info['n'] was 2 once and 3"),
        ([START, {**TURN, "info": {}}], "info['n'] was 2 once and 'missing'"),
        ([START, {**TURN, "info": {"n": 2, "m": None}}], "info['m'] was 'missing' once and None"),
        ([START], "one episode took 1 turns and the other 0"),
    ],
)
def test_the_first_difference_is_put_in_words(other, words):
    assert words in difference([START, TURN], other)


def test_of_long_texts_the_place_that_differs_is_shown():
    one, other = "x" * 500 + "left" + "x" * 500, "x" * 500 + "right" + "x" * 500
    words = difference([{**START, "observation": one}], [{**START, "observation": other}])
    assert "left" in words
    assert "right" in words
    assert len(words) < 250


def test_words_from_anywhere_become_one_printable_line():
    assert plain("two\nlines") == "two lines"
    assert plain("\x1b[31mred") == "\\x1b[31mred"
    assert plain("a\ud800") == "a\\ud800"
    assert len(plain("a" * 10_000)) < 300
    assert short("a" * 10_000).startswith("'aaa")
