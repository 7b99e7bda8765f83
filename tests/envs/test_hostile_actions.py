"""Any text is an action: none raises, and none takes longer than its length explains."""

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollgym
from rollgym.core.env import MAX_ACTION_CHARS
from rollgym.core.errors import UsageError

SHIPPED = [card.env_id for card in rollgym.list_envs() if card.env_id.startswith("rollgym/")]
ADAPTED = ["CartPole-v1", "CliffWalking-v1", "Pendulum-v1", "Blackjack-v1"]
BROWSER = {"rollgym/WebShopBrowser-v0"}
"""Needs a browser; its own tests send it odd actions."""
LONG = 40_000
PIECES = [
    *" \t\n\r\0()[]{}\"'`=:;,.-+*/\\|<>1a",
    *("\ud800", "\u2028", "\x1b[31m", "\U0001f600", "٣", "²", "İ", "ﬁ", "e\u0301", "\x85"),
    *("[1, ", '{"a": ', "1e", "0x", "1,", "a ", "||", "```\n", "``` ", "click[", "search[", "up, "),
]
HEADS = [
    "",
    "click[",
    "search [",
    "answer: ",
    "answer",
    "fill 1 1 ",
    "guess ",
    "move a ",
    "```python\n",
    "```",
    "1 + ",
]
TAILS = ["", "]", "!", " = 1", "\n```\nsubmit"]
WHOLE = [
    *("1" * 5_000, "-" + "9" * 400, "1e999", "NaN", "-Infinity", "null", "true", "[]", "{}", "[[[]]]"),
    *("answer: nan", "answer: " + "9" * 5_000, "answer: 1e400", "fill ٣ ٣ ٣", "reveal -1 -1", "0" * 12),
    *(
        "search[" + "x " * 9_000 + "]",
        "click[" + "\0" * 99 + "]",
        "```\n```\n```\n```",
        "submit",
        "```\nsubmit",
    ),
]
ACTIONS = [
    *WHOLE,
    *(
        "".join([head, piece * (LONG // len(piece)), tail])
        for head, tail in zip(HEADS, TAILS * 3, strict=False)
        for piece in PIECES
    ),
]


class Played:
    """An environment that begins again whenever an episode is over."""

    def __init__(self, env_id: str) -> None:
        try:
            self.env = rollgym.make(env_id)
            self.seed = 0
            self.env.reset(seed=0)
        except UsageError as error:
            pytest.skip(str(error))

    def play(self, action: str) -> None:
        observation, reward, terminated, truncated, info = self.env.step(action)
        observation.encode()
        assert math.isfinite(reward)
        assert isinstance(info["valid"], bool)
        if terminated or truncated:
            self.seed += 1
            self.env.reset(seed=self.seed)


@pytest.mark.parametrize("env_id", [*(one for one in SHIPPED if one not in BROWSER), *ADAPTED])
def test_no_action_raises(env_id: str) -> None:
    played = Played(env_id)
    # Blocks of code really run: a few of each kind are enough there.
    runs = env_id in ("rollgym/Code-v0", "rollgym/PythonTool-v0")
    for action in ACTIONS[:: 5 if runs else 1]:
        played.play(action)
    if not runs:

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(st.lists(st.characters() | st.sampled_from(PIECES), max_size=200))
        def any_text(parts: list[str]) -> None:
            played.play("".join(parts))

        any_text()
    played.env.close()


READERS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from types import SimpleNamespace
import rollgym.agents.parsing as parsing
from rollgym.envs.code import actions, formatting, questions
from rollgym.envs.countdown.env import CountdownEnv
from rollgym.envs.countdown.arithmetic import BadExpression
from rollgym.envs.webshop import actions as shop
from rollgym.rewards import judge
from rollgym.envs import answers as answer_reader
from rollgym.envs.instructions import generate, rules
from rollgym.envs.math import judge as math_judge
import rollgym.adapters.spaces as spaces
import re

def countdown(text):
    env = CountdownEnv()
    env.reset(seed=0)
    try: env._work_out(text)
    except BadExpression: pass

def parsed(text):
    for name in parsing.PARSERS:
        parsing.read_action(parsing.make_parser(name), text, ["up", "move up"])

def code(text):
    parsed = actions.parse_action(text)
    actions.submits(parsed), actions.parse_answer(parsed), actions.defines(text, "f")
    formatting.masked(text), questions.read_number(text)

def shopping(text):
    for strict in (True, False):
        shop.parse(text, SimpleNamespace(strict_grammar=strict))

def answers(text):
    answer_reader.read_answer(text, lambda line: math_judge.read_number(line) is not None)
    math_judge.read_number(text)

def constraints(text):
    arguments = {"relation": "at least", "let_relation": "at least", "capital_relation": "at least"}
    for rule in rules.RULES.values():
        made = {int: 2, str: "ab", list: ["ab", "c d"]}
        given = {name: made[kind] for name, kind in rule.arguments.items()}
        rule.check(text, {**given, **{name: arguments[name] for name in given if name in arguments}})
    generate.fault_of(text, "Write a text.")

readers = {
    "answers": answers, "constraints": constraints,
    "countdown": countdown, "parsed": parsed, "code": code, "shopping": shopping,
    "judge": lambda text: list(re.finditer(judge.PATTERN, text, re.IGNORECASE)),
    "spaces": lambda text: (spaces._FENCE.fullmatch(text), spaces.folded(text)),
}
read = readers[sys.argv[1]]
N = 100_000
heads = ["* ", "<<", "P.S.", "Section"]
heads += ["", "```", "answer", "Score:", "f ", "f:", "[", "x[", "<answer>", "\\\\boxed{", "\\\\text{"]
for head in heads:
    for piece in [" ", "\\t", "\\n", "[", "]", "=", " =", "1", "`", "{", "\\\\", "<", "*", ":", "0x"]:
        read(head + piece * (N // len(piece)) + "!")
"""
"""Reads long texts of one piece repeated. A pattern that tries each pair of places needs minutes for one."""


@pytest.mark.parametrize(
    "reader", [*["answers", "constraints", "countdown", "parsed", "code", "shopping", "judge", "spaces"]]
)
def test_reading_takes_no_more_steps_than_a_text_has_characters(reader: str) -> None:
    ran = subprocess.run([sys.executable, "-c", READERS, reader], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr or "its 30 seconds of CPU time were used up"


def test_an_action_is_cut_before_an_environment_sees_it() -> None:
    env: Any = rollgym.make("rollgym/Wordle-v0")
    env.reset(seed=0)
    seen: list[str] = []
    env.unwrapped.respond = lambda action: seen.append(action) or rollgym.StepResult("")
    env.step("x" * (MAX_ACTION_CHARS + 1))
    assert len(seen[0]) == MAX_ACTION_CHARS
