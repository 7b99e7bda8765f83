"""How values travel, when two are the same answer, and how actions are read."""

import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest

from rollgym.envs.code.actions import defines, parse_action, parse_answer, submits
from rollgym.envs.code.compare import format_value, values_equal
from rollgym.envs.code.formatting import cut, format_run, format_test_results, masked
from rollgym.envs.code.harness import NotData, decode, encode
from rollgym.envs.code.judge import Result
from rollgym.envs.code.questions import is_right, read_number
from rollgym.sandbox.types import Ended, Limits, Ran

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        pytest.param(10**5000, id="long"),
        2.5,
        math.inf,
        "naïve \ud800",
        b"\x00\xff",
        1 + 2j,
        [1, [2, ()]],
        (1,),
        {3, 1},
        frozenset("ab"),
        {"a": 1, (1, 2): {None: []}},
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


def test_subclasses_and_iterators_become_plain() -> None:
    assert encode(Counter("aab")) == {"dict": [["a", 2], ["b", 1]]}
    assert encode(OrderedDict(x=1)) == {"dict": [["x", 1]]}
    assert encode(Point(1, 2)) == {"tuple": [1, 2]}
    assert encode(range(3)) == encode(iter([0, 1, 2])) == [0, 1, 2]


def test_what_is_not_data_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), [print], loop, (0 for _ in iter(int, 1))):
        with pytest.raises(NotData):
            encode(value)


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        ([1, 2], (1, 2), True),
        (2, 2.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, False),
        (None, False, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        ("1", 1, False),
        (10**400, 1e300, False),
        (math.nan, math.nan, True),
        ([1, 2], [1, 2, 3], False),
        (b"a", "a", False),
    ],
)
def test_when_two_values_are_the_same_answer(found: Any, expected: Any, equal: bool) -> None:
    assert values_equal(encode(found), encode(expected)) is equal


def test_what_a_liar_may_send_is_compared_without_harm() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    for lie in (
        {},
        {"a": 1, "b": 2},
        {"int": "zz"},
        {"dict": 3},
        {"object": ["x", True]},
        deep,
        {"tuple": 5},
    ):
        assert not values_equal(lie, encode([1]))
        assert not values_equal(lie, encode({1: 2}))
        assert format_value(lie)


def test_values_are_shown_as_python_writes_them_and_sets_in_order() -> None:
    value = {"b": (1,), "a": [None, "x"]}
    assert format_value(encode(value)) == repr(value)
    assert format_value(encode({"pear", "apple", "fig"})) == "{'apple', 'fig', 'pear'}"
    assert format_value(encode(set())) == "set()"
    assert format_value(encode("y" * 500)).endswith("(502 characters)")


def test_a_block_is_taken_out_of_an_action() -> None:
    parsed = parse_action("Let me try.\n```python\nx = 1\nprint(x)\n```\nThat is it.")
    assert parsed.blocks == ("x = 1\nprint(x)\n",)
    assert "Let me try." in parsed.text
    assert "That is it." in parsed.text
    assert not submits(parsed)


@pytest.mark.parametrize("fence", ["```", "```py", "```Python", "  ``` python3"])
def test_fences_may_name_python_or_nothing(fence: str) -> None:
    assert parse_action(f"{fence}\nx = 1\n```").blocks == ("x = 1\n",)


def test_other_languages_and_inline_code_are_no_blocks() -> None:
    assert parse_action("```bash\nls\n").blocks == ()
    assert parse_action("use `x` and ```y``` here").blocks == ()


def test_an_unclosed_last_block_counts_and_two_blocks_are_two() -> None:
    assert parse_action("```python\nx = 1").blocks == ("x = 1\n",)
    assert len(parse_action("```\na\n```\n```\nb\n```").blocks) == 2


@pytest.mark.parametrize(
    "text", ["submit", " Submit. ", "`submit`", "done\nSUBMIT", "```python\nx\n```\nsubmit"]
)
def test_submit_is_read_forgivingly(text: str) -> None:
    assert submits(parse_action(text))


@pytest.mark.parametrize("text", ["```python\nsubmit\n```", "I will submit now", "submit()"])
def test_submit_inside_a_block_or_a_sentence_is_none(text: str) -> None:
    assert not submits(parse_action(text))


def test_which_blocks_define_the_function() -> None:
    assert defines("import re\ndef f(x):\n    return x", "f")
    assert defines("f = lambda x: x", "f")
    assert defines("class f: ...", "f")
    assert not defines("    def f(x): ...", "f")
    assert not defines("def ff(x): ...", "f")
    assert not defines("f(1)", "f")


@pytest.mark.parametrize(
    ("text", "value"),
    [("answer: 408", "408"), ("So.\nAnswer = 3.5.", "3.5"), ("**Final answer:** 7", "7"), ("x", None)],
)
def test_an_answer_is_taken_out_of_an_action(text: str, value: str | None) -> None:
    assert parse_answer(parse_action(text)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("408", 408), ("1,234.50", 1234.5), ("$ -7 coins", -7), ("2e3", 2000), ("1 or 2", None), ("", None)],
)
def test_numbers_are_read_from_text(text: str, value: float | None) -> None:
    assert read_number(text) == value


def test_an_answer_may_differ_by_rounding_only() -> None:
    assert is_right(0.1 + 0.2, 0.3)
    assert not is_right(0.3001, 0.3)
    assert not is_right(10**12 + 10**4, 10**12)


def _ran(**changes: Any) -> Ran:
    plain = {
        "stdout": "",
        "stderr": "",
        "exit_code": 0,
        "ended": Ended.EXIT,
        "seconds": 1.0,
        "state": "committed",
    }
    return Ran(**(plain | changes))


def test_an_execution_is_told_in_plain_sentences() -> None:
    limits = Limits(seconds=3, memory_mb=64)
    assert format_run(_ran(), limits, 100) == "It ran and printed nothing."
    assert format_run(_ran(stdout="hi\n"), limits, 100) == "stdout:\nhi"
    killed = _ran(exit_code=None, ended=Ended.TIMEOUT, state="rolled_back")
    assert format_run(killed, limits, 100) == (
        "It was stopped after 3 seconds. The session is as it was before this block."
    )
    memory = format_run(_ran(exit_code=None, ended=Ended.MEMORY, state="lost"), limits, 100)
    assert "64 MB" in memory
    assert "lost" in memory
    assert (
        format_run(_ran(stderr="oh", exit_code=4), limits, 100) == "stderr:\noh\nIt ended with exit code 4."
    )


def test_addresses_are_masked_and_small_numbers_are_not() -> None:
    assert masked("<f at 0x7f12ab34cd56> 0xff 0x10") == "<f at 0x...> 0xff 0x10"


def test_long_output_keeps_its_head_and_tail() -> None:
    short = cut("a" * 500 + "b" * 500, 90)
    assert short.startswith("a" * 60 + "\n... 910 characters left out ...")
    assert short.endswith("b" * 30)


def test_results_of_public_tests_name_the_failures() -> None:
    results = [Result(True), Result(False, "it returned 3")]
    assert format_test_results(["f(1) == 1", "f(2) == 2"], results) == (
        "Public tests: 1 of 2 passed.\nfailed: f(2) == 2: it returned 3"
    )
