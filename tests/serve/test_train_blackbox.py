"""A policy is trained behind a program that knows nothing but its address, and learns."""

import shlex
import sys
from pathlib import Path

import pytest
from training import Story, fast_versions, lines

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.main import run_training

PROGRAM = Path(__file__).parents[2] / "examples" / "blackbox_bandit.py"
COMMAND = shlex.join([sys.executable, "-I", "-S", str(PROGRAM)])


def taught(folder: Path, *settings: str) -> Path:
    """A policy that knows the form of an answer, and nothing more."""
    settings = (*settings, "evaluation.episodes=4", "tracking.tensorboard=false")
    run_training("bandit-grpo", settings, folder / "taught", imitate_only=True, plain=True)
    return folder / "taught" / "final"


def train_behind(folder: Path, model: Path, *settings: str) -> Path:
    """A run in which a program plays every episode."""
    chosen = [f"program={COMMAND}", f"model.path={model}", "warm_start=null", "tracking.tensorboard=false"]
    run_training("bandit-grpo", [*chosen, *settings], folder / "run", plain=True)
    return folder / "run"


def test_two_steps_are_trained_on_what_a_program_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    folder = train_behind(
        tmp_path, model, "rollout.groups=2", "rollout.group_size=4", "stop.steps=2",
        "evaluation.every=0", "evaluation.episodes=3",
    )  # fmt: skip
    story = Story.of(folder)
    assert [line["step"] for line in story.metrics] == [1, 2]
    assert len(story.episodes) == 16
    assert {turn["policy_version"] for one in story.episodes for turn in one["turns"]} == {0, 1}
    for one in story.episodes:
        (turn,) = one["turns"]
        assert turn["observation"].startswith("Machines: ")
        assert len(turn["action_ids"]) == len(turn["logprobs"]) > 0
        assert one["outcome"] == "terminated"
        assert one["success"] == (turn["action"].strip() == "Comet")
        assert turn["reward"] in (0.0, 0.4, 1.0)
    before = (model / "model.safetensors").read_bytes()
    assert (folder / "final" / "model.safetensors").read_bytes() != before


GREEDY = """
import http.client, json, runpy, sys
usual = http.client.HTTPConnection.request

def asking(self, method, url, body, headers):
    narrow = {"temperature": 0.0, "top_p": 0.05, "top_k": 1, "min_p": 0.9, "seed": 5}
    return usual(self, method, url, json.dumps(json.loads(body) | narrow), headers)

http.client.HTTPConnection.request = asking
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_program_does_not_choose_what_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the likeliest token with one seed; the run samples as if it had not."""
    fast_versions(monkeypatch)
    model = taught(tmp_path, "warm_start.episodes=100")
    settings = (
        "rollout.groups=2", "rollout.group_size=4", "stop.steps=1", "agent.temperature=0.9",
        "evaluation.every=0", "evaluation.episodes=1",
    )  # fmt: skip
    plain = Story.of(train_behind(tmp_path, model, *settings))
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    words = shlex.join([sys.executable, "-I", "-S", str(script), str(PROGRAM)])
    greedy = tmp_path / "greedy"
    greedy.mkdir()
    story = Story.of(train_behind(greedy, model, f"program={words}", *settings))
    assert story.weights == plain.weights
    assert len({one["turns"][0]["action"] for one in story.episodes}) > 1, "all members said the same"
    assert story.metrics[0]["train_rollout_logprob_diff_max"] < 1e-4


def test_a_program_is_not_imitated() -> None:
    with pytest.raises(UsageError, match="set warm_start to null"):
        load(TrainConfig, find_config("bandit-grpo"), [f"program={COMMAND}"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_policy_behind_a_program_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast_versions(monkeypatch)
    model = taught(tmp_path)
    folder = train_behind(
        tmp_path, model, "rollout.groups=8", "rollout.max_in_flight=16", "stop.steps=25",
        "evaluation.every=0",
    )  # fmt: skip
    before, *_, after = lines(folder / "evaluations.jsonl")
    print(f"success {before['success_rate']:.3f} before, {after['success_rate']:.3f} after")
    assert after["success_rate"] > before["success_rate"] + 0.2
    assert after["success_rate"] > 0.75
