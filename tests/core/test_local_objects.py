"""Classes, functions and instances in place of names: in evaluation, for environments, agents and rewards."""

import asyncio
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from lessons import Yes

import rollgym
from rollgym import AgentSetup, Briefing, StepResult, Task, TextEnv
from rollgym.core.agent import agent_name
from rollgym.core.errors import RewardError, UsageError
from rollgym.core.registry import env_id_of
from rollgym.core.serialization import read_episodes
from rollgym.evaluation.replay import replay
from rollgym.evaluation.runner import Request, evaluate
from rollgym.rewards.function import FunctionScorer
from rollgym.rewards.settings import RewardSettings, make_scorer


class Door(TextEnv):
    """Opens for one word."""

    reward_range = (0.0, 1.0)

    def __init__(self, word: str = "open", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.word = word

    def begin(self, task: Task) -> str:
        return f"A door. The word is {self.word}."

    def respond(self, action: str) -> StepResult:
        return StepResult("", float(action == self.word), terminated=True, success=action == self.word)


def speak(observation: str, info: Mapping[str, Any]) -> str:
    return observation.removesuffix(".").rpartition(" ")[2]


class Speaker:
    """An agent that counts what it is asked for."""

    def __init__(self, setup: AgentSetup | None = None) -> None:
        self.players = 0
        self.closed = False

    def player(self, briefing: Briefing) -> "Speaker":
        assert not self.closed
        self.players += 1
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        return speak(observation, info)

    async def close(self) -> None:
        self.closed = True


def nested() -> type[Door]:
    class Gate(Door):
        pass

    return Gate


def straight(work: Callable[[], Any]) -> Any:
    return work()


def under_a_loop(work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return work()

    return asyncio.run(main())


def in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("way", [straight, under_a_loop, in_a_thread])
@pytest.mark.parametrize(
    ("env", "agent", "names"),
    [
        (Door, speak, (f"{__name__}:Door", f"{__name__}:speak")),
        (nested(), Speaker, ("local/Gate", f"{__name__}:Speaker")),
        (lambda **more: Door("please", **more), lambda observation, info: "please", ("local/lambda",) * 2),
        (functools.partial(Door, "sesame"), Speaker(), ("local/Door", "local/Speaker")),
    ],
    ids=["class", "nested class", "factory", "partial and instance"],
)
def test_objects_are_evaluated(
    tmp_path: Path, way: Callable[..., Any], env: Any, agent: Any, names: tuple[str, str]
) -> None:
    summary = way(lambda: evaluate(Request(env_id=env, agent=agent, episodes=3), tmp_path / "run"))
    assert summary["success_rate"] == 1.0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    said = manifest["env"]["id"], manifest["agent"]["name"]
    for part, name, start in zip((manifest["env"], manifest["agent"]), said, names, strict=True):
        assert name.startswith(start)
        assert ("defined_in" in part) == name.startswith("local/")


def test_an_instance_stays_open_and_an_object_keeps_its_name(tmp_path: Path) -> None:
    agent, env = Speaker(), nested()
    for name in ("one", "two"):
        evaluate(Request(env_id=env, agent=agent, episodes=2), tmp_path / name)
    assert (agent.players, agent.closed) == (4, False)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0]["env"] == manifests[1]["env"]
    assert manifests[0]["env"]["defined_in"] == f"{__name__}:nested.<locals>.Gate"
    assert manifests[0]["agent"]["defined_in"] == f"{__name__}:Speaker"


def test_different_objects_of_one_name_have_different_names() -> None:
    first, second = nested(), nested()
    assert env_id_of(first) != env_id_of(second)
    assert env_id_of(first) == env_id_of(first)
    assert type(rollgym.make(second).unwrapped) is second
    assert type(rollgym.make(Door, word="x").unwrapped) is Door


def test_workers_make_what_they_can_import(tmp_path: Path) -> None:
    summary = evaluate(Request(env_id=Yes, agent=lambda o, i: "yes", episodes=2, workers=1), tmp_path / "run")
    assert summary["success_rate"] == 1.0
    with pytest.raises(UsageError, match=r"local/Gate.* that worker processes can import.*use workers=0"):
        Request(env_id=nested(), agent="random", workers=1)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (Door(), "passed as an instance of Door, but each episode needs its own: pass the class"),
        (Speaker, r"The class Speaker has no reset\(\) and step\(\)"),
        (7, "cannot be an object of type int: pass an id, a class, or a function"),
    ],
)
def test_what_cannot_be_an_environment_is_a_sentence(env: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Request(env_id=env, agent="random")


def test_what_cannot_be_an_agent_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"cannot be an object of type float: pass a name, a function of"):
        Request(env_id=Door, agent=0.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"is an instance and takes no options \('size'\)"):
        rollgym.make_agent(Speaker(), AgentSetup(env_id="x"), size=3)
    assert agent_name("random") == "random"


def test_a_recorded_object_is_replayed_only_where_it_is_known(tmp_path: Path) -> None:
    evaluate(Request(env_id=nested(), agent=speak, episodes=2), tmp_path / "run")
    episodes = read_episodes(tmp_path / "run" / "episodes.jsonl")
    assert all(one.same for one in replay(episodes))
    words = [sys.executable, "-m", "rollgym", "replay", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "was a Python object in another process: pass the object again from Python, or put it" in told
    assert "Traceback" not in done.stderr


def scores(scorer: Any, episode: Any) -> Any:
    async def main() -> Any:
        try:
            return await scorer.score(episode)
        finally:
            await scorer.close()

    return asyncio.run(main())


def three(episode: Any) -> float:
    return 3.0


def test_reward_functions_are_passed_as_objects(tmp_path: Path) -> None:
    evaluate(Request(env_id=Door, agent=speak, episodes=1), tmp_path / "run")
    (episode,) = read_episodes(tmp_path / "run" / "episodes.jsonl")
    factor = 2.5
    scorer = FunctionScorer(lambda episode: factor * episode.length)
    assert scores(scorer, episode).reward == 2.5
    assert FunctionScorer(three).target == f"{__name__}:three"
    given = RewardSettings(kind="function", target=lambda episode: 4.0, name="four")  # type: ignore[arg-type]
    assert scores(make_scorer(given).scorers["four"], episode).reward == 4.0
    waits = FunctionScorer(lambda episode: threading.Event().wait(5), timeout=0.05)
    with pytest.raises(RewardError, match=r"took longer than 0.05 s"):
        scores(waits, episode)


def test_what_cannot_be_a_reward_function_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="A reward function cannot be an object of type int"):
        FunctionScorer(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="or leave out workers, memory_mb and pool"):
        FunctionScorer(lambda episode: 1.0, workers=2)
    with pytest.raises(
        UsageError, match="The reward function 'local/gone' was a Python object in another process: pass the"
    ):
        FunctionScorer("local/gone")


def test_gymnasium_objects_are_taken_too() -> None:
    env = rollgym.make(lambda **more: gym.make("FrozenLake-v1", **more))
    assert env.reset(seed=1)[0]
