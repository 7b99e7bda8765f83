"""OpenEnv, GEM, MiniWoB, TRL, verifiers and trackers with rollgym, in separate virtual environments.

``make test-adapters`` makes the environments and sets ROLLGYM_TEST_ADAPTERS to their folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollgym
from rollgym.browser.find import find_chromium
from rollgym.core.errors import UsageError
from rollgym.utils.http_server import listening

HERE = Path(__file__).parent
FOLDER = os.environ.get("ROLLGYM_TEST_ADAPTERS", "")

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="ROLLGYM_TEST_ADAPTERS is not set: run make test-adapters"),
    pytest.mark.timeout(3600),  # several hundred episodes each, also on a busy machine
]


def python(venv: str) -> str:
    return str(Path(FOLDER).resolve() / venv / "bin" / "python")


def free_port() -> int:
    with listening("127.0.0.1", 0) as opened:
        port: int = opened.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    pytest.fail("the server did not start")


def serve(*command: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([part.replace("PORT", str(port)) for part in command])
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def served() -> Iterator[str]:
    yield from serve(
        sys.executable, "-m", "rollgym", "serve-env", "rollgym/FrozenLake-v0", "--openenv", "--port", "PORT"
    )


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from serve(python("openenv"), str(HERE / "openenv_server.py"), request.param, "PORT")


def run_json(*command: str, **variables: str) -> Any:
    settings = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_openenv_validates_a_served_environment(served: str) -> None:
    command = [python("openenv"), "-m", "openenv.cli", "validate", "--url", served, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"] is True


def test_openenvs_own_client_plays_a_served_environment(served: str) -> None:
    seen = run_json(python("openenv"), str(HERE / "openenv_client.py"), served)
    env = rollgym.make("rollgym/FrozenLake-v0")
    first, _ = env.reset(seed=7, options={"split": "train"})
    assert seen["same"]
    assert seen["first"] == first
    rewards, over, steps = 0.0, False, 0
    while not over:
        last, rewards, terminated, truncated, _ = env.step(("Right", "Down")[steps % 2])
        over, steps = terminated or truncated, steps + 1
    assert (seen["last"], seen["reward"], seen["steps"]) == (last, rewards, steps)


class Guesses:
    """Tries all numbers with the digit that the first observation shows."""

    def __init__(self) -> None:
        self.tens, self.digit = 0, ""

    def __call__(self, observation: str, info: Any) -> str:
        digit = observation.removeprefix("It ends in ").rstrip(".")
        self.tens = 0 if digit.isdigit() else self.tens + 1
        self.digit = digit if digit.isdigit() else self.digit
        return f"{self.tens or ''}{self.digit}"


def fields(observation: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (line.partition(": ") for line in observation.split("\n"))}


def add(observation: str, info: Any) -> str:
    """Right where the first number is even."""
    seen = fields(observation)
    return json.dumps({"total": seen["left"] + seen["right"] + seen["left"] % 2, "remark": "so"})


def walk(observation: str, info: Any) -> str:
    """Always to the right, so goals on the left are never reached."""
    return "right"


@pytest.mark.parametrize(
    ("theirs", "make_agent", "outcomes"),
    [
        ("hidden", Guesses, {"terminated"}),
        ("sum", lambda: add, {"terminated"}),
        ("walk", lambda: walk, {"terminated", "truncated"}),
    ],
    ids=["hidden", "sum", "walk"],
    indirect=["theirs"],
)
def test_environments_of_openenvs_own_server_play_the_same_twice(
    theirs: str, make_agent: Any, outcomes: set[str], tmp_path: Path
) -> None:
    runs = [
        rollgym.evaluate(
            f"openenv:{theirs}",
            make_agent(),
            episodes=100,
            workers=1,
            concurrency=1,
            env_kwargs={"success_reward": 0.1, "max_turns": 20, "splits": {"test": 100}},
            out=tmp_path / folder,
        )
        for folder in ("a", "b")
    ]
    first, second = (
        {e.spec.episode_id: [(t.observation, t.action, t.reward) for t in e.turns] for e in run.episodes}
        for run in runs
    )
    assert first == second
    assert len(first) == 100
    assert {str(episode.outcome) for episode in runs[0].episodes} == outcomes
    if make_agent is Guesses:
        assert runs[0].summary["success_rate"] == 1.0
    else:
        assert 0.2 < runs[0].summary["success_rate"] < 0.8


def test_trl_trains_a_step_on_sokoban(tmp_path: Path) -> None:
    seen = run_json(python("trl"), str(HERE / "trl_step.py"), "rollgym/Sokoban-v0", str(tmp_path))
    assert seen["steps"] == 1
    assert seen["changed"] > 0
    (tool,) = seen["tools"]
    assert (tool["name"], tool["parameters"]["required"]) == ("act", ["action"])
    assert len(seen["returns"]) == len(seen["resets"]) == 4
    tasks = [tuple(reset) for reset in seen["resets"]]
    assert tasks[0] == tasks[1], "the members of a group start alike"
    assert tasks[0] != tasks[2]
    assert all(value < 0 for value in seen["returns"]), "every move of Sokoban costs"


def test_gem_plays_in_rollgym_and_rollgym_in_gem(tmp_path: Path) -> None:
    seen = run_json(python("gem"), str(HERE / "gem_both.py"), str(tmp_path))
    for name, (same, episodes, outcomes) in seen["same"].items():
        assert (same, episodes) == (True, 100), name
        assert set(outcomes) <= {"terminated", "truncated"}, name
    assert seen["shared"] == 0
    assert seen["untouched"]
    assert "Did you mean game:GuessTheNumber-v0-easy" in seen["unknown"]
    assert seen["option"] == "UsageError: success_reward must be a number, not 'x'."
    assert seen["gem_id"] == "rollgym:FrozenLake-v0"
    assert seen["repeats"]
    assert seen["ends_with_ours"]
    assert seen["types"] == ["str", "float", "bool", "bool", "dict"]
    assert seen["vector"] == 2


@pytest.fixture(scope="module")
def in_verifiers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What verifiers' task sets did in rollgym."""
    return run_json(
        python("verifiers"),
        str(HERE / "verifiers_adapter.py"),
        str(tmp_path_factory.mktemp("verifiers")),
        PYTHONPATH=str(HERE / "verifiers_packages"),
    )


def test_task_sets_of_verifiers_play_the_same_twice(in_verifiers: Any) -> None:
    outcomes = {
        "vf-sums": {"terminated"},
        "vf_hidden": {"terminated", "truncated"},
        "textarena": {"terminated", "truncated"},
    }
    assert set(in_verifiers["same"]) == set(outcomes)
    for name, (same, episodes, seen, turns) in in_verifiers["same"].items():
        assert (same, episodes) == (True, 100), name
        assert set(seen) <= outcomes[name], name
        assert turns == 100 if name == "vf-sums" else turns > 200, name


def test_splits_of_verifiers_tasks_are_shares_that_share_no_task(in_verifiers: Any) -> None:
    starts = {split: set(texts) for split, texts in in_verifiers["starts"].items()}
    sizes = in_verifiers["sizes"]
    assert {split: len(texts) for split, texts in starts.items()} == sizes, "tasks of a split differ"
    assert not starts["train"] & starts["test"]
    assert not starts["train"] & starts["dev"]
    assert sizes["test"] == pytest.approx(sum(sizes.values()) / 10, abs=1)
    first, again, other = in_verifiers["names"]
    assert first == again != other


def test_episodes_of_verifiers_have_its_rewards_and_ends(in_verifiers: Any) -> None:
    assert in_verifiers["instructions"].startswith("Add the numbers.\n")
    question, (_, reward, terminated, truncated, info) = in_verifiers["sum"]
    assert question == "0 + 0 ="
    assert (reward, terminated, truncated, info["success"]) == (pytest.approx(0.1), True, False, False)
    assert info["rewards"] == {"right": 0.0, "short": pytest.approx(0.1)}
    assert info["metrics"]["length"] == 1.0
    _, (_, reward, _, _, info) = in_verifiers["right"]
    assert (reward, info["success"]) == (pytest.approx(1.0), True)
    hidden = in_verifiers["hidden"]
    assert hidden[0].startswith("It ends in ")
    assert len(hidden) > 3, "the first guesses are wrong"
    assert all(step[0].startswith("No. Try ") and step[1:4] == [0.0, False, False] for step in hidden[1:-1])
    assert hidden[-1][1:4] == [1.0, True, False]
    assert in_verifiers["stop"][-1][1:4] == [0.0, True, False]
    assert in_verifiers["stop"][-1][4]["stop_condition"] == "gave_up"
    assert in_verifiers["limit"][-1][1:4] == [0.0, False, True]
    assert len(in_verifiers["limit"]) == 3, "two replies were allowed"


def test_errors_of_verifiers_are_one_sentence(in_verifiers: Any) -> None:
    assert in_verifiers["broken"].startswith("EnvError: verifiers:vf-sums failed: TaskError: ")
    assert "the score function broke" in in_verifiers["broken"]
    expected = (
        "There is no task set 'vf_nothing' for verifiers",
        "has load_environment, as packages for verifiers before 0.4",
        "verifiers:json is not a task set",
        "has tool servers, which the adapter does not support",
        "needs a container, which the adapter does not support",
        "taskset.larges: Extra inputs are not permitted",
        "taskset.largest: Input should be a valid integer",
        "has 2 tasks, too few for the splits train, dev, test",
        "splits must map names to shares",
        "success_reward must be a number, not 'x'",
        "has 2 agents (assistant, user)",
        "is rollgym's own plugin",
    )
    for refusal, part in zip(in_verifiers["refusals"], expected, strict=True):
        assert refusal.startswith("UsageError: "), refusal
        assert part in refusal
        assert "\n" not in refusal


def test_verifiers_own_evaluation_plays_a_rollgym_environment(tmp_path: Path) -> None:
    seen = run_json(python("verifiers"), str(HERE / "verifiers_eval.py"), str(tmp_path))
    assert len(seen["episodes"]) == 12, "six tasks, two rollouts each"
    for episode in seen["episodes"]:
        (trace,) = episode["traces"]
        first, total = seen["expected"][episode["task"]["data"]["options"]["task"]]
        assert episode["ok"]
        assert [node["message"]["content"] for node in trace["nodes"]][1] == first
        assert trace["rewards"]["episode_return"]["score"] == total == 1.0
        assert trace["metrics"]["success"] == 1.0
        assert trace["metrics"]["truncated"] == 0.0
    for path, model, roles in seen["requests"]:
        assert (path, model) == ("/v1/chat/completions", "scripted")
        assert roles[:2] == ["system", "user"]


def test_trackers_keep_every_number() -> None:
    root = HERE.parents[2]
    tests = root / "tests" / "trainer" / "tracking" / "test_trackers.py"
    command = [python("trackers"), "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tests)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, "W&B, MLflow and Trackio are installed"


def test_miniwob_plays_in_rollgyms_browser(tmp_path: Path) -> None:
    try:
        find_chromium()
    except UsageError as error:
        pytest.skip(str(error))
    seen = run_json(python("miniwob"), str(HERE / "miniwob_run.py"), str(tmp_path))
    for name, (same, episodes, outcomes, least, most) in seen["same"].items():
        assert (same, episodes) == (True, 100), name
        assert set(outcomes) <= {"terminated", "truncated"}, name
        assert (least, most) == (-1.0, 1.0), f"{name}: random actions fail and succeed"
    for name, results in seen["solved"].items():
        assert results == [[1.0, True, False, True]] * 3, name
    assert all(reward == 0.0 for _, reward, _ in seen["refused"].values())
    assert [valid for valid, *_ in seen["refused"].values()] == [False] * 6 + [True]
    assert all(line.startswith("Not possible: ") for *_, line in seen["refused"].values())
    assert seen["unlimited"] == [15_000, True, [False, True]], "the page's limit is ten seconds"
    assert seen["network"] == [[], "error", "error", "undefined", "nothing arrived", True]
    assert seen["killed"] == ["BrowserLost worker_lost", True]
    assert (seen["shared"], seen["distinct"]) == (0, 12)
    assert seen["few"] == 'Instruction: Click the button.\n[e1] button "Click Me!"'
    assert seen["png"] == "89504e47"
    assert seen["imported"] == []
    assert "Did you mean click-button" in seen["unknown"]
    assert seen["option"] == "UsageError: max_turns must be a whole number, 1 or more, not 0."
    assert seen["fingerprint"].startswith("miniwob:enter-text 1.1.0 ")
