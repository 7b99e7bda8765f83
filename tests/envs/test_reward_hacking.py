"""Replies without an answer earn nothing in any domain with verifiable rewards."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

import pytest

from rollgym.config.loader import parse
from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.env import text_interface
from rollgym.core.registry import make

DOMAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "math": ("rollgym/Math-v0", {}),
    "math with working": ("rollgym/Math-v0", {"level": 1, "working": True}),
    "instructions": ("rollgym/Instructions-v0", {}),
    "instructions, by fraction": ("rollgym/Instructions-v0", {"reward": "fraction"}),
    "questions": ("rollgym/Questions-v0", {}),
    "judge": ("rollgym/Judge-v0", {}),
    "code snippets": ("rollgym/CodeSnippets-v0", {}),
    "code, one turn": ("rollgym/Code-v0", {"max_turns": 1}),
}
TASKS = 8


def replies(observation: str, info: Mapping[str, Any]) -> list[str]:
    """Replies that a policy could learn in place of the task."""
    actions = [str(action) for action in info.get("actions", ())]
    options = [action.removeprefix("Answer: ") for action in actions]
    return [
        *("", " ", "\n\n", ".", "Answer:", "Answer: ", "\\boxed{}", "```python\n```"),
        *("{}", "[]", '""', "* \n* "),
        *("Answer: Answer: Answer:", "answer " * 50, "A " * 50, "AAAA", "1 " * 50, "\n".join("ABCD")),
        *("A B C D", "A, B, C, D", "A\nB\nC\nD", "Answer: A, B, C or D", "all of the above"),
        *("\n".join(f"Answer: {n}" for n in range(50)), "\n".join(map(str, range(200)))),
        *("\n".join(f"\\boxed{{{n}}}" for n in range(50)), " ".join(map(str, range(50)))),
        *("\n".join(actions), " ".join(options), ", ".join(options), "\n".join(options)),
        *(observation, f"{observation}\n{observation}", f"Answer: {observation}"),
        f"\\boxed{{{observation}}}",
        *("I am sure that this is the right answer.", "Correct.", "All points hold.", "all tests passed"),
    ]  # fmt: skip


def mixture() -> dict[str, tuple[str, dict[str, Any]]]:
    """The environments that the config `rlvr-mix` trains on."""
    settings = parse((resources.files("rollgym.trainer") / "configs" / "rlvr-mix.yaml").read_text())
    return {f"{env['domain']} of rlvr-mix": (env["id"], env["kwargs"]) for env in settings["envs"]}


@pytest.mark.parametrize("domain", [*DOMAINS, *mixture()])
def test_replies_without_an_answer_earn_nothing(domain: str) -> None:
    env_id, kwargs = {**DOMAINS, **mixture()}[domain]
    env = make(env_id, **kwargs)
    few = env_id == "rollgym/Code-v0"  # blocks really run
    try:
        for task in range(2 if few else TASKS):
            observation, info = env.reset(seed=0, options={"task": task, "split": "test"})
            for reply in replies(observation, info):
                env.reset(seed=0, options={"task": task, "split": "test"})
                _, reward, terminated, truncated, info = env.step(reply)
                assert (reward, info["success"]) == (0.0, False), (observation, reply)
                assert terminated or truncated
    finally:
        env.close()


@pytest.mark.parametrize("domain", [name for name in DOMAINS if "code" not in name])
def test_the_expert_earns_everything_in_one_turn(domain: str) -> None:
    env_id, kwargs = DOMAINS[domain]
    env = make(env_id, **kwargs)
    expert: Any = make_agent("expert", AgentSetup(env_id=env_id, env_kwargs=kwargs))
    for task in range(TASKS):
        observation, info = env.reset(seed=0, options={"task": task, "split": "dev"})
        _, reward, terminated, _, _ = env.step(expert.choose(observation, info))
        assert (reward, terminated) == (1.0, True)


def test_code_in_one_turn_is_judged_by_its_first_block() -> None:
    env = make("rollgym/Code-v0", max_turns=1, reward="all", reveal=True)
    try:
        assert "1 turns" in text_interface(env).instructions
        env.reset(seed=0, options={"task": 0, "split": "test"})
        _, reward, terminated, _, info = env.step("```python\nprint(1)\n```")
        assert (reward, terminated, info["success"]) == (0.0, True, False)
    finally:
        env.close()
