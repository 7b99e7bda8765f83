"""The Python API: evaluate, load_run, check, train and atrain."""

import asyncio
import importlib.util
import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import rollgym
from rollgym import TextEnv
from rollgym.core import local_objects
from rollgym.core.errors import MissingExtra, ResultsError, UnknownName, UsageError
from rollgym.evaluation.runner import Request, evaluate
from rollgym.io.run_dir import EPISODES, EVALUATIONS, MANIFEST, METRICS

LAKE, BANDIT = "rollgym/FrozenLake-v0", "rollgym/Bandit-v0"


class Yes(TextEnv):
    """One turn: `yes` is right."""

    instructions = "Answer `yes` or `no`."
    reward_range = (0.0, 1.0)

    def begin(self, task):
        return "Well?"

    def respond(self, action):
        right = action.strip() == "yes"
        return rollgym.StepResult("Thanks.", float(right), terminated=True, success=right)

    def facts(self):
        return {"actions": ["yes", "no"]}


def test_evaluate_plays_the_episodes_of_rollgym_eval_and_returns_the_results(tmp_path):
    results = rollgym.evaluate(LAKE, "random", episodes=6, seed=3, out=tmp_path / "a")
    summary = evaluate(Request(env_id=LAKE, agent="random", episodes=6, seed=3), tmp_path / "b")
    assert results.path == tmp_path / "a"
    assert results.summary["content_hash"] == summary["content_hash"]
    assert [episode.spec.episode_id for episode in results.episodes] == [
        episode.spec.episode_id for episode in rollgym.load_run(tmp_path / "b").episodes
    ]


def test_evaluate_takes_classes_and_functions_and_writes_to_runs_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_objects, "_objects", {})  # other tests of this process passed lambdas, too

    async def inside():
        return rollgym.evaluate(Yes, lambda observation, info: "yes", episodes=4)

    results = asyncio.run(inside())
    assert results.path.parent == Path("runs")
    assert results.summary["success_rate"] == 1.0
    assert results.manifest["agent"]["name"] == "local/lambda"


def test_evaluate_passes_every_argument_on(tmp_path):
    results = rollgym.evaluate(
        LAKE,
        "rollgym.agents.random:RandomAgent",
        episodes=4,
        split="dev",
        per_task=2,
        env_kwargs={"size": 5},
        limits=rollgym.Limits(turns=3),
        out=tmp_path / "run",
    )
    manifest = results.manifest
    assert (manifest["split"], manifest["per_task"], manifest["env"]["kwargs"]) == ("dev", 2, {"size": 5})
    assert manifest["limits"]["turns"] == 3
    assert {episode.length <= 3 for episode in results.episodes} == {True}
    with pytest.raises(UsageError, match="--episodes must be at least 1"):
        rollgym.evaluate(LAKE, "random", episodes=0, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_evaluate_resumes(tmp_path):
    rollgym.evaluate(Yes, "random", episodes=2, out=tmp_path / "run")
    results = rollgym.evaluate(Yes, "random", episodes=5, out=tmp_path / "run", resume=True)
    assert len(list(results.episodes)) == 5


def test_load_run_of_an_evaluation(tmp_path):
    rollgym.evaluate(Yes, "random", episodes=8, out=tmp_path / "run")
    run = rollgym.load_run(str(tmp_path / "run"))
    assert (run.kind, run.config, run.metrics, run.entries) == ("eval", {}, [], {})
    records = run.to_records()
    assert [record["return"] for record in records] == [episode.total_reward for episode in run.episodes]
    assert all(not isinstance(value, (dict, list)) for record in records for value in record.values())
    assert records[0]["env"] == run.manifest["env"]["id"]
    (evaluation,) = run.evaluations
    assert evaluation["success_rate"] == run.summary["success_rate"]
    assert evaluation["length/mean"] == 1.0
    assert run.evaluations_array("success_ci/0").shape == (1,)
    assert repr(run) == f"RunResults('{tmp_path / 'run'}', kind='eval')"


@pytest.fixture
def trained(tmp_path):
    """The folder of a training run of three steps, written by hand."""
    rollgym.evaluate(Yes, "random", episodes=3, out=tmp_path / "eval")
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "kind": "train"}))
    (folder / "config.yaml").write_text("name: small\nstop:\n  steps: 3\n")
    lines = (tmp_path / "eval" / EPISODES).read_text().splitlines()
    (folder / EPISODES).write_text(
        "".join(f'{{"step":{step},{line[1:]}\n' for step, line in enumerate(lines, 1))
    )
    metrics = [
        {"step": 1, "time": 1.0, "return": 0.25, "outcomes": {"terminated": 3}},
        {"step": 2, "time": 2.0, "return": 0.5, "not_finite": ["grad_norm"]},
        {"step": 3, "time": 3.0, "train_rollout_logprob_diff": 0.0},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in metrics)
    (folder / METRICS).write_text(text + '{"step": 4, "ret')
    (folder / EVALUATIONS).write_text(
        '{"step":0,"phase":"before","success_rate":0.5,"success_ci":[0.1,0.9]}\n'
    )
    return folder


def test_load_run_of_a_training_run(trained):
    run = rollgym.load_run(trained)
    assert (run.kind, run.summary, run.config) == ("train", None, {"name": "small", "stop": {"steps": 3}})
    np.testing.assert_array_equal(run.metrics_array("return"), [0.25, 0.5, np.nan])
    np.testing.assert_array_equal(run.metrics_array("outcomes/terminated"), [3, np.nan, np.nan])
    np.testing.assert_array_equal(run.metrics_array("grad_norm"), [np.nan] * 3)
    assert "not_finite" not in run.metrics[1]
    np.testing.assert_array_equal(run.evaluations_array("success_ci/1"), [0.9])
    assert [record["step"] for record in run.to_records()] == [1, 2, 3]


def test_an_old_metric_name_is_answered_with_the_new_one(trained):
    run = rollgym.load_run(trained)
    with pytest.raises(UnknownName) as caught:
        run.metrics_array("logprob_gap")
    assert str(caught.value) == (
        "There is no metric called 'logprob_gap'. logprob_gap was renamed in 0.2.0: use "
        "train_rollout_logprob_diff."
    )
    with pytest.raises(UnknownName, match="Did you mean return"):
        run.metrics_array("retrun")


def test_load_run_of_a_suite(tmp_path, rollgym_command):
    entry = '[[entries]]\nname = "{}"\nenv = "{}"\ntasks = {}\nsuccess = "{}"\n'
    suite = tmp_path / "tiny.toml"
    suite.write_text(
        'schema = 1\nname = "tiny"\nversion = 1\nsummary = "Two small entries"\nseed = 0\n'
        + entry.format("a", BANDIT, 2, rollgym.make(BANDIT).unwrapped.success_means)
        + entry.format("b", LAKE, 3, rollgym.make(LAKE).unwrapped.success_means)
    )
    ran = rollgym_command("bench", "run", suite, "--agent", "random", "--out", "run")
    assert ran.code == 0, ran.err
    run = rollgym.load_run("run")
    assert (run.kind, list(run.entries)) == ("bench", ["a", "b"])
    assert [record["entry"] for record in run.to_records()] == ["a", "a", "b", "b", "b"]
    assert [record["entry"] for record in run.evaluations] == ["a", "b"]
    assert len(list(run.episodes)) == 5


def test_load_run_runs_no_code_and_follows_no_link(trained, tmp_path):
    manifest = {"schema": 1, "kind": "eval", "env": {"id": "evil_module:Env"}, "modules": ["evil_module"]}
    (trained / "evil_module.py").write_text("raise SystemExit('imported')")
    (trained / MANIFEST).write_text(json.dumps(manifest))
    assert len(list(rollgym.load_run(trained).episodes)) == 3
    shutil.move(trained / EPISODES, tmp_path / "secret")
    (trained / EPISODES).symlink_to(tmp_path / "secret")
    with pytest.raises(ResultsError, match="link that leads out of the folder"):
        list(rollgym.load_run(trained).episodes)


def test_load_run_refuses_what_it_cannot_read(trained, tmp_path):
    with pytest.raises(UsageError, match="Run folder .*nowhere does not exist"):
        rollgym.load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a run folder: it has no manifest\.json"):
        rollgym.load_run(tmp_path)
    (trained / METRICS).write_text('{"step": 1}\n{broken}\n')
    with pytest.raises(ResultsError, match=r"metrics\.jsonl, line 2: "):
        rollgym.load_run(trained).metrics_array("step")
    (trained / EPISODES).write_text("{}\n")
    with pytest.raises(ResultsError, match=r"episodes\.jsonl, line 1: not an episode"):
        rollgym.load_run(trained).to_records()
    (trained / MANIFEST).write_text('{"schema": 99}')
    with pytest.raises(ResultsError, match="upgrade rollgym"):
        rollgym.load_run(trained)


def test_check_takes_an_id_or_a_class():
    assert rollgym.check("rollgym/Bandit-v0", quick=True, rules=["deterministic", "close"]).ok

    class Local(Yes):
        pass

    report = rollgym.check(Local, quick=True, rules=["runs", "processes"])
    assert report.ok
    assert report.env_id == "local/Local-v0"
    assert report.with_status("skipped") == ("processes",)


def test_train_and_atrain_are_those_of_the_trainer():
    from rollgym.trainer import main

    assert (rollgym.train, rollgym.atrain) == (main.train, main.atrain)
    assert inspect.iscoroutinefunction(rollgym.atrain)


def test_without_the_extra_train_only_a_call_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    monkeypatch.setattr("rollgym.core.extras.find_spec", lambda module: None)
    for name in ("train", "atrain"):
        monkeypatch.delitem(vars(rollgym), name, raising=False)
        missing = getattr(rollgym, name)
        with pytest.raises(MissingExtra, match=r"^Training needs .*\[train\]"):
            missing("bandit-grpo")


def test_train_runs_and_load_run_reads_it(tmp_path):
    options = {"plain": True, "stop": {"steps": 1}, "rollout.groups": 2, "evaluation": {"episodes": 4}}
    result = rollgym.train("bandit-grpo", out=tmp_path / "run", **options)
    assert (result.folder, result.steps) == (tmp_path / "run", 1)
    run = rollgym.load_run(tmp_path / "run")
    assert (run.kind, run.config["stop"]["steps"]) == ("train", 1)
    assert run.metrics_array("return").shape == (1,)
    assert run.evaluations_array("success_rate").size >= 1
