"""The code environment: what blocks do, how it ends, and that walls are needed."""

from collections.abc import Iterator
from typing import Any

import pytest

import rollgym
from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.envs.code.env import CodeEnv
from rollgym.envs.code.expert import CodeExpert
from rollgym.sandbox.types import Sandbox

TASK: dict[str, Any] = {"task": 3, "split": "test"}


@pytest.fixture
def env(sandbox: Sandbox) -> Iterator[CodeEnv]:
    code_env = CodeEnv(sandbox={"limits": {"seconds": 60}})
    yield code_env
    code_env.close()


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def solved(info: dict[str, Any]) -> str:
    return CodeExpert(AgentSetup(env_id="x")).choose("", info)


def test_an_episode_from_the_question_to_the_verdict(env: CodeEnv) -> None:
    observation, info = env.reset(seed=0, options=TASK)
    assert info["signature"] in observation
    assert all(line in observation for line in info["examples"])
    assert info["sandbox"]["backend"] in ("namespaces", "landlock", "docker")
    assert info["sandbox"]["level"] in ("namespaces", "landlock")
    assert isinstance(info["weaknesses"], list)
    observation, reward, terminated, _, info = env.step(solved(info))
    assert "Public tests: 3 of 3 passed." in observation
    assert (reward, terminated, info["has_solution"]) == (0.0, False, True)
    observation, reward, terminated, truncated, info = env.step("submit")
    assert observation == "Hidden tests: 12 of 12 passed."
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["sandbox"]["level"]


def test_names_and_files_last_from_turn_to_turn_and_not_to_the_next_episode(env: CodeEnv) -> None:
    env.reset(seed=0, options=TASK)
    env.step(block("x = 41\nopen('note', 'w').write('hello')"))
    assert env.step(block("print(x + 1, open('note').read())"))[0].startswith("stdout:\n42 hello\n")
    env.reset(seed=0, options=TASK)
    assert "NameError" in env.step(block("print(x)"))[0]
    assert "FileNotFoundError" in env.step(block("open('note')"))[0]


def test_a_killed_block_is_told_and_the_session_is_as_before(sandbox: Sandbox) -> None:
    env = CodeEnv(sandbox={"limits": {"seconds": 3}})
    env.reset(seed=0, options=TASK)
    env.step(block("x = 1"))
    observation = env.step(block("x = 2\nwhile True: pass"))[0]
    assert "It was stopped after 3 seconds. The session is as it was before this block." in observation
    assert env.step(block("print(x)"))[0].startswith("stdout:\n1\n")
    env.close()


def test_errors_and_exit_codes_are_shown(env: CodeEnv) -> None:
    env.reset(seed=0, options=TASK)
    assert "ZeroDivisionError" in env.step(block("1 / 0"))[0]
    assert "SyntaxError" in env.step(block("def ("))[0]


def test_long_output_is_cut_and_addresses_are_masked(sandbox: Sandbox) -> None:
    env = CodeEnv(output_chars=300)
    env.reset(seed=0, options=TASK)
    assert len(env.step(block("print('a' * 5000)"))[0]) < 500
    assert "object at 0x..." in env.step(block("print(object())"))[0]
    env.close()


def test_the_reward_is_a_share_or_all(sandbox: Sandbox) -> None:
    half = {"problems": "generated", "family": "2 steps"}
    for reward, expected in (("fraction", True), ("all", False)):
        env = CodeEnv(**half, reward=reward)
        _, info = env.reset(seed=0, options=TASK)
        # Right for lists of one number or none, which are among the hidden tests.
        program = solved(info).replace("    return xs", "    return xs if len(xs) < 6 else None")
        env.step(program)
        got, terminated = env.step("submit")[1:3]
        assert terminated
        assert (0 < got < 1) is expected
        env.close()


def test_submit_with_a_block_judges_that_block_without_running_it(env: CodeEnv) -> None:
    _, info = env.reset(seed=0, options=TASK)
    observation, reward, terminated, _, _ = env.step(f"{solved(info)}\nsubmit")
    assert (reward, terminated) == (1.0, True)
    assert "stdout" not in observation


def test_the_solution_is_the_last_block_that_defines_the_function(env: CodeEnv) -> None:
    _, info = env.reset(seed=0, options=TASK)
    env.step(solved(info))
    env.step(block(f"def {info['function']}(*a): return None"))
    env.step(block("print('something else')"))
    assert env.step("submit")[1] == 0.0


def test_a_solution_must_work_by_itself(env: CodeEnv) -> None:
    _, info = env.reset(seed=0, options=TASK)
    env.step(block("helper = 3"))
    observation = env.step(block(f"def {info['function']}(*a):\n    return helper"))[0]
    assert "Public tests: 0 of 3 passed. Each failed: NameError: name 'helper' is not defined." in observation


def test_nothing_to_submit_and_nonsense_are_invalid_and_use_a_turn(env: CodeEnv) -> None:
    env.reset(seed=0, options=TASK)
    for action in ("submit", "hello", block("1") + "\n" + block("2")):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["valid"]) == (0.0, False, False)
    assert info["turns_left"] == 5


def test_the_last_turn_judges_what_there_is(sandbox: Sandbox) -> None:
    env = CodeEnv(max_turns=2)
    _, info = env.reset(seed=0, options=TASK)
    env.step(solved(info))
    observation, reward, terminated, truncated, info = env.step(block("print(1)"))
    assert "No turns left. Hidden tests: 12 of 12 passed." in observation
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    env.reset(seed=0, options=TASK)
    env.step("what")
    observation, reward, terminated, _, _ = env.step("what")
    assert (reward, terminated) == (0.0, True)
    env.close()


def test_public_tests_can_end_it(sandbox: Sandbox) -> None:
    env = CodeEnv(end_on_pass=True)
    _, info = env.reset(seed=0, options=TASK)
    observation, reward, terminated, _, _ = env.step(solved(info))
    assert "Public tests: 3 of 3 passed.\nHidden tests: 12 of 12 passed." in observation
    assert (reward, terminated) == (1.0, True)
    env.close()


def test_a_session_that_lies_in_wait_has_no_say_in_the_verdict(env: CodeEnv) -> None:
    """Processes and patched modules of the session are gone when the hidden tests run."""
    _, info = env.reset(seed=0, options=TASK)
    trap = (
        "import os, time, signal, threading, json, builtins\n"
        "json.loads = json.dumps = None\nbuiltins.exec = builtins.compile = None\n"
        "def kill():\n    while True:\n        for p in os.listdir('/proc'):\n"
        "            if p.isdigit() and int(p) not in (1, os.getpid()):\n"
        "                try: os.kill(int(p), 9)\n                except OSError: pass\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        "if os.fork() == 0:\n    os.setsid()\n    kill()"
    )
    env.step(block(trap))
    observation, reward, terminated, _, _ = env.step(f"{solved(info)}\nsubmit")
    assert (observation, reward, terminated) == ("Hidden tests: 12 of 12 passed.", 1.0, True)


def test_hidden_tests_are_nowhere_an_agent_looks(env: CodeEnv) -> None:
    observation, info = env.reset(seed=0, options=TASK)
    hidden = env._problem.hidden.cases  # type: ignore[union-attr]
    look = "import pathlib\nfor p in pathlib.Path('.').rglob('*'): print(p.is_file() and p.read_text())"
    seen = observation + repr(info) + env.step(block(look))[0]
    assert not any(repr(case.arguments)[1:-1] in seen for case in hidden if len(repr(case.arguments)) > 12)
    assert "solution" not in info


def test_reveal_tells_the_solution(sandbox: Sandbox) -> None:
    env = CodeEnv(reveal=True)
    _, info = env.reset(seed=0, options=TASK)
    assert info["function"] in info["solution"]
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"reward": "some"}, "fraction, all"),
        ({"max_turns": 0}, "1 or more"),
        ({"output_chars": 5}, "100 or more"),
        ({"form": "mbpp"}, "from a file"),
        ({"problems": "nowhere.jsonl"}, "Data file not found: nowhere.jsonl"),
        ({"problems": "nowhere.jsonl", "family": "maths"}, "generated problems"),
    ],
)
def test_wrong_arguments_are_explained(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CodeEnv(**kwargs)


@pytest.mark.parametrize(("agent", "success"), [("expert", 1.0), ("random", 0.0)])
def test_the_expert_always_wins_and_chance_never(sandbox: Sandbox, agent: str, success: float) -> None:
    env = rollgym.make("rollgym/Code-v0")
    rng = rollgym.core.seeding.derive_rng("test", agent)
    wins = 0
    for index in range(20):
        observation, info = env.reset(seed=index, options={"task": index, "split": "test"})
        over = False
        while not over:
            face: Any = env.unwrapped
            action = solved(info) if agent == "expert" else face.random_action(observation, info, rng)
            observation, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        wins += info["success"]
    env.close()
    assert wins / 20 == success
