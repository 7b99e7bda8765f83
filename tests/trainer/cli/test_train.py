"""``rollgym train`` and ``rollgym imitate``: a mistake is one sentence and leaves no files."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, write

Command = Callable[..., Any]
LISTED = "rollgym: code that the config names: "
"""Printed before the environments of the tests are imported."""


@pytest.fixture(autouse=True)
def _fast_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_versions(monkeypatch)


@pytest.fixture
def train(rollgym_command: Command, tmp_path: Path) -> Command:
    """Run ``rollgym train small.yaml ...`` with a small config and changes."""

    def run(*words: object, command: str = "train", config: str = "small.yaml", **changes: Any) -> Any:
        write(tmp_path, **changes)
        return rollgym_command(command, *([config] if config else []), *words)

    return run


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown setting": ("rollout.gruops=3", {}, "Did you mean groups"),
    "a value of the wrong kind": ("stop.steps=many", {}, "stop.steps"),
    "an argument that is not a setting": ("faster", {}, "faster"),
    "settings that contradict": ("estimator=gae", {}, "estimator=gae requires a critic"),
    "an unknown environment": (
        "",
        {"envs": [{"id": "rollgym/Sokobann-v0"}]},
        "Did you mean rollgym/Sokoban-v0",
    ),
    "an unknown split": ("", {"envs": [{"id": "lessons:Yes", "split": "trian"}]}, "Did you mean train?"),
    "an unknown split to evaluate on": ("evaluation.split=tset", {}, "Did you mean test?"),
    "an argument that the environment does not have": (
        "",
        {"envs": [{"id": "lessons:Yes", "kwargs": {"color": "red"}}]},
        "unexpected keyword argument 'color'",
    ),
    "a missing module": ("imports=[no_such_module]", {}, "imports no_such_module"),
    "more groups than tasks": (
        "rollout.groups=4",
        {"envs": [{"id": "lessons:Few"}]},
        "rollout.groups is 4, but the split 'train' of lessons:Few has only 3 tasks",
    ),
    "more held-out episodes than tasks": (
        "evaluation.episodes=51",
        {"envs": [{"id": "lessons:Few"}]},
        "Split 'test' of lessons:Few has 50 tasks",
    ),
    "--resume without --out": ("--resume", {}, "--resume --out runs/NAME"),
    "--resume of nothing": (
        "--resume --out nowhere",
        {},
        "Nothing to resume in nowhere: it has no manifest.json.",
    ),
}


@pytest.mark.parametrize(("words", "changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_no_files(
    train: Command, tmp_path: Path, words: str, changes: dict[str, Any], message: str
) -> None:
    ran = train(*words.split(), **changes)
    assert ran.code == 2, ran.err
    assert message in ran.err
    said = [line for line in ran.err.strip().splitlines() if not line.startswith(LISTED)]
    assert len(said) == 1, ran.err
    assert ran.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_a_misspelled_config_is_suggested(train: Command) -> None:
    ran = train(config="frozen-lake-gpro")
    assert ran.code == 2
    assert "Did you mean frozen-lake-grpo" in ran.err


def test_without_a_config_the_error_names_the_list(train: Command) -> None:
    ran = train(config="")
    assert ran.code == 2
    assert "rollgym config list" in ran.err


def test_overrides_alone_are_not_a_config(train: Command) -> None:
    ran = train(config="stop.steps=3")
    assert ran.code == 2
    assert "No config given: pass a YAML file or a name from `rollgym config list`." in ran.err


def test_imitation_needs_a_warm_start_section(train: Command, tmp_path: Path) -> None:
    ran = train(command="imitate")
    assert ran.code == 2
    assert "the config has no warm_start section" in ran.err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_an_error(train: Command) -> None:
    ran = train("--out", "small.yaml/run")
    assert ran.code == 2
    assert "Cannot write the run to small.yaml/run" in ran.err


def test_runs_are_named_by_time_and_config_so_that_training_twice_works(
    train: Command, tmp_path: Path
) -> None:
    for _ in range(2):
        ran = train("stop.steps=0")
        assert ran.code == 0, ran.err
        assert "0 steps in" in ran.out
    first, second = sorted((tmp_path / "runs").iterdir())
    assert re.fullmatch(r"\d{8}-\d{6}-small", first.name)
    assert "-small" in second.name
    assert f"policy: runs/{second.name}/final" in ran.out
    assert (second / "final" / "model.safetensors").is_file()


def test_as_json_it_prints_one_object(train: Command) -> None:
    ran = train("stop.steps=1", "--json")
    summary = json.loads(ran.out)
    assert re.fullmatch(r"runs/\d{8}-\d{6}-small", summary["run"])
    assert summary["steps"] == 1
    assert [line["phase"] for line in summary["evaluations"]] == ["before", "after"]


def test_imitate_command(train: Command) -> None:
    ran = train(
        "--json", command="imitate", warm_start={"agent": "lessons:Teacher", "episodes": 4, "epochs": 1}
    )
    assert ran.code == 0, ran.err
    assert [line["phase"] for line in json.loads(ran.out)["evaluations"]] == ["before", "warm_start", "after"]


def test_an_existing_run_is_not_overwritten(train: Command, tmp_path: Path) -> None:
    train("stop.steps=1", "--out", "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ran = train("stop.steps=1", "--out", "run")
    assert ran.code == 2
    assert "run already holds a run: add --resume" in ran.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_resume_lists_changed_settings_and_accepts_those_that_may_change(train: Command) -> None:
    train("stop.steps=1", "--out", "run")
    ran = train("--resume", "--out", "run", "seed=4", "learner.learning_rate=0.1", "stop.steps=2")
    assert ran.code == 2
    assert "seed: 0 / 4" in ran.err
    assert "learner.learning_rate: 0.003 / 0.1" in ran.err
    assert "stop.steps" not in ran.err
    ran = train("--resume", "--out", "run", "stop.steps=2", "checkpoints.keep=1", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == 2


def test_steps_may_not_change_if_the_schedule_depends_on_them(train: Command) -> None:
    schedule = {"learner": {"schedule": "linear"}}
    train("stop.steps=1", "--out", "run", **schedule)
    ran = train("--resume", "--out", "run", "stop.steps=2", **schedule)
    assert ran.code == 2
    assert "stop.steps: 1 / 2" in ran.err


def test_resume_needs_only_the_folder(train: Command) -> None:
    train("stop.steps=1", "--out", "run")
    ran = train("stop.steps=2", "--resume", "--out", "run", "--trust-code", "--json", config="")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == 2
    assert "run: 2 steps, 1 done" in ran.err


def test_resume_of_another_kind_of_run_is_rejected(rollgym_command: Command) -> None:
    rollgym_command("eval", "lessons:Yes", "--episodes", 2, "--out", "results")
    ran = rollgym_command("train", "--resume", "--out", "results")
    assert ran.code == 2
    assert "config.yaml" in ran.err


def test_a_damaged_checkpoint_is_reported(train: Command, tmp_path: Path) -> None:
    train("--out", "run")
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "learner.safetensors").write_bytes(b"")
    ran = train("--resume", "--out", "run")
    assert ran.code == 0, ran.err
    assert "step-00000004 is damaged: learner.safetensors was changed after it was written" in ran.err
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "learner.safetensors").write_bytes(b"")
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").unlink()
    ran = train("--resume", "--out", "run")
    assert ran.code == 1
    assert "All checkpoints of this run are damaged" in ran.err
    assert "state.json is missing" in ran.err


HOPELESS = {
    "rewards that are not numbers": ("lessons:NotANumber", "returned the reward nan; it must be finite"),
    "an environment that raises": ("lessons:Broken", "the lever came off"),
}


@pytest.mark.parametrize(("env", "why"), HOPELESS.values(), ids=HOPELESS)
def test_if_every_episode_fails_the_run_ends_with_the_reason(train: Command, env: str, why: str) -> None:
    train("stop.steps=0", "--out", "model")
    ran = train("--out", "run", envs=[{"id": env}], model={"path": "model/final"})
    assert ran.code == 1
    last = ran.err.splitlines()[-1]
    assert "groups in a row could not be filled" in last
    assert why in last


@pytest.mark.parametrize(("env", "why"), HOPELESS.values(), ids=HOPELESS)
def test_no_policy_is_made_for_an_environment_that_cannot_be_played(
    train: Command, env: str, why: str
) -> None:
    ran = train("--out", "run", envs=[{"id": env}])
    assert ran.code == 1
    assert why in ran.err.splitlines()[-1]
    assert not Path("run").exists()


def test_a_failed_start_removes_only_what_it_created(train: Command, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    for out in ("a/b", "empty", "mine"):
        ran = train("--out", out, model={"path": "broken"})
        assert ran.code != 0
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"
    assert list((tmp_path / "empty").iterdir()) == []


TYPOS = {
    "train frozen-lake-gpro": "Did you mean frozen-lake-grpo",
    "imitate frozen-lake-gpro": "Did you mean frozen-lake-grpo",
    "train frozen-lake-grpo stop.step=3": "Did you mean steps?",
    "train frozen-lake-grpo estimator=grop": "Did you mean grpo?",
    "train frozen-lake-grpo loss.name=gpro": "There is no policy loss called 'gpro'",
    "train frozen-lake-grpo envs.0.id=rollgym/FrozenLak-v0": "Did you mean rollgym/FrozenLake-v0",
    "train frozen-lake-grpo envs.0.kwargs.sise=4": "unexpected keyword argument 'sise'",
    "train frozen-lake-grpo evaluation.split=tset": "Did you mean test?",
    "train frozen-lake-grpo model.path=nowhere": "model.path nowhere",
    "train frozen-lake-grpo --ot x": "No such option: --ot",
    "plan frozen-lake-gpro": "Did you mean frozen-lake-grpo",
    "plan frozen-lake-grpo stop.step=3": "Did you mean steps?",
    "config show frozen-lake-gpro": "Did you mean frozen-lake-grpo",
    "eval rollgym/FrozenLak-v0": "Did you mean rollgym/FrozenLake-v0",
    "eval rollgym/FrozenLake-v0 --agent lmm": "Did you mean lm?",
    "eval rollgym/FrozenLake-v0 --agent lm --model nowhere": "nowhere",
    "eval rollgym/FrozenLake-v0 --agent lm --model x --agent-arg temprature=1": "temprature",
    "model new rollgym/FrozenLak-v0 --out x": "Did you mean rollgym/FrozenLake-v0",
    "serve nowhere": "nowhere",
}


def test_a_typo_is_reported_without_importing_torch(tmp_path: Path) -> None:
    code = """
import contextlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "ray"):
            raise AssertionError(f"{name} was imported")

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: object() if name == "torch" else real(name, package)
sys.meta_path.insert(0, Refuse())
from rollgym.cli import main

answers = {}
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main(line.split())
            code = 0
        except SystemExit as end:
            code = end.code
    answers[line] = [code, said.getvalue()]
print(json.dumps(answers))
"""
    words = [sys.executable, "-c", code, json.dumps(list(TYPOS))]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    answers = json.loads(ran.stdout.splitlines()[-1])
    wrong = {line: answers[line] for line, message in TYPOS.items() if message not in answers[line][1]}
    assert wrong == {}
    assert {code for code, _ in answers.values()} == {2}
    assert list(tmp_path.iterdir()) == []


def test_help_has_an_example(rollgym_command: Command) -> None:
    ran = rollgym_command("train", "--help")
    assert ran.code == 0
    assert "Example: rollgym train" in ran.out
    assert "--resume" in ran.out
