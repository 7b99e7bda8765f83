import pytest

from rollgym.agents.parsing import make_parser, read_action, strip_thinking, take_action
from rollgym.core.errors import UsageError


def parse(name: str, reply: str) -> str | None:
    action, matched = take_action(make_parser(name), reply)
    return action if matched else None


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<answer>Up</answer>", "Up"),
        ("I go <ANSWER> Up \n</Answer> now", "Up"),
        ("<answer>Up</answer> no: <answer>Down</answer>", "Down"),
        ("<answer>Up</answer> or <answer>Do", "Up"),
        ("the <answer> tag holds it: <answer>Left</answer>", "Left"),
        ("so I play <answer>Right", "Right"),
        ("<answer>Right</answer></answer>", "Right"),
        ("<answer></answer>", ""),
        ("<answer>", None),
        ("Up</answer>", None),
        ("Up", None),
        ("<action>Up</action>", None),
        ("İİİ <answer>Up</answer>", "Up"),
    ],
)
def test_the_last_complete_answer_counts(reply: str, action: str | None) -> None:
    assert parse("answer", reply) == action


def test_the_action_parser_reads_action_tags() -> None:
    assert parse("action", "<answer>Up</answer><action>Down</action>") == "Down"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\text{Up}}", "Up"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{2", None),
        (r"} \boxed{4}", "4"),
        ("{5}", None),
    ],
)
def test_a_box_is_read_with_balanced_braces(reply: str, action: str | None) -> None:
    assert parse("boxed", reply) == action


def test_the_last_line_is_the_last_that_is_not_blank() -> None:
    assert parse("last_line", "I think so.\n  Up  \n\n \n") == "Up"
    assert parse("last_line", " \n ") is None


def test_raw_is_the_whole_reply() -> None:
    assert parse("raw", "  Up\nDown ") == "Up\nDown"
    assert parse("raw", "") is None


def test_a_pattern_gives_its_first_group_of_the_last_match() -> None:
    assert parse(r"regex:move=(\w+)", "move=Up move=Down") == "Down"
    assert parse(r"regex:[A-Z]\w+", "go Up") == "Up"
    assert parse(r"regex:move=(\w+)", "Up") is None


@pytest.mark.parametrize("name", ["anser", "regex:", "regex:(", ""])
def test_a_wrong_parser_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        make_parser(name)


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("<think>hm</think>Up", "Up"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("opened in the prompt</think>Up", "Up"),
        ("Up <think>cut off", "Up"),
        ("<thinking>hm</thinking> Up", "Up"),
        ("<THINK>a <think> b</think> Up", "Up"),
        ("Up", "Up"),
    ],
)
def test_thinking_is_left_out(reply: str, rest: str) -> None:
    assert strip_thinking(reply) == rest


def test_an_answer_inside_the_thinking_does_not_count() -> None:
    assert parse("answer", "<answer>Up</answer><think><answer>Down</answer></think>") == "Up"
    assert parse("answer", "<think><answer>Down</answer></think>") is None


def test_a_miss_gives_the_reply_without_its_thinking() -> None:
    assert take_action(make_parser("answer"), "<think>hm</think> go up ") == ("go up", False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "piece"),
    [("answer", "<answer>"), ("boxed", "\\boxed{"), ("raw", "<think>"), ("boxed", "{")],
)
def test_long_nonsense_is_read_once(name: str, piece: str) -> None:
    # A quadratic parser would take minutes here, and exceed the time limit.
    assert parse(name, piece * 200_000) is None


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("I would go left, or rather Right.", "Right"),
        ("RIGHT", "Right"),
        ("Upright", None),
        ("go far left", "far left"),
        ("", None),
    ],
)
def test_the_last_listed_action_that_is_named_counts(reply: str, action: str | None) -> None:
    reading = read_action(make_parser("listed"), reply, ["Left", "Right", "Up", "far left"])
    assert (reading.action if reading.form else None) == action


def test_without_a_list_nothing_is_listed() -> None:
    assert read_action(make_parser("listed"), "Up").form is None


@pytest.mark.parametrize(
    ("reply", "action", "form"),
    [
        ("no <answer>Up</answer> Down", "Up", "answer"),
        ("I go Down\nnow", "Down", "listed"),
        ("I go home\nnow", "now", "regex:n(o|a)w"),
        ("home", "home", None),
    ],
)
def test_forms_are_tried_in_order(reply: str, action: str, form: str | None) -> None:
    parser = make_parser("answer|listed|regex:n(o|a)w")
    reading = read_action(parser, reply, ["Up", "Down"])
    assert reading.form == form
    assert reading.action == ("o" if form and form.startswith("regex") else action)


@pytest.mark.parametrize("name", ["answer|", "|raw", "answer||raw", "answer|anser", "raw|regex:("])
def test_a_list_of_forms_with_a_wrong_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        make_parser(name)
