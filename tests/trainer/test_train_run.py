"""The run folder: equal settings and seeds give bit-identical runs, and the folder documents the run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import Story, digest, lines

from rollgym.config.loader import fingerprint, load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig

Run = Callable[..., Path]


def test_the_same_settings_and_seed_give_the_same_weights_metrics_and_episodes(train_here: Run) -> None:
    """Rule 34."""
    first, second = Story.of(train_here("first")), Story.of(train_here("second"))
    assert first.weights == second.weights
    assert first.metrics == second.metrics
    assert first.episodes == second.episodes
    assert first.evaluations == second.evaluations
    assert first.summary == second.summary


def test_training_changes_the_weights_at_every_step(train_here: Run) -> None:
    """Otherwise the other tests here would prove nothing."""
    folder = train_here("run")
    assert all(line["grad_norm"] > 0 for line in lines(folder / "metrics.jsonl"))
    assert digest(folder / "final" / "model.safetensors") != digest(folder / "model" / "model.safetensors")


def test_another_seed_gives_other_weights_and_other_tasks(train_here: Run) -> None:
    """Rule 34."""
    first, second = Story.of(train_here("first")), Story.of(train_here("second", seed=1))
    assert first.weights != second.weights
    assert [one["spec"]["task"] for one in first.episodes] != [one["spec"]["task"] for one in second.episodes]


def test_worker_processes_change_nothing(train_here: Run) -> None:
    """Rule 34."""
    assert Story.of(train_here("none")) == Story.of(train_here("two", rollout={"workers": 2}))


def test_how_many_episodes_play_at_once_changes_nothing(train_here: Run) -> None:
    """Rule 34."""
    few = train_here("few", rollout={"max_in_flight": 3}, engine={"max_batch": 2})
    assert Story.of(few) == Story.of(train_here("many"))


def test_the_summary_has_the_stop_reason_and_every_evaluation(train_here: Run) -> None:
    folder = train_here("run")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["kind"] == "train"
    assert summary["ended"] == "all 4 steps are done"
    assert summary["steps"] == 4
    assert summary["seconds"] > 0
    assert [(line["step"], line["phase"]) for line in summary["evaluations"]] == [
        (0, "before"),
        (2, "training"),
        (4, "training"),
        (4, "after"),
    ]
    assert summary["last_success"] == summary["evaluations"][-1]["success_rate"]


def test_the_manifest_has_environments_seed_and_versions(train_here: Run) -> None:
    """Rule 37."""
    folder = train_here("run", seed=3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["envs"] == [{"id": "lessons:Yes", "kwargs": {}}]
    assert manifest["seed"] == 3
    assert {"rollgym", "numpy", "torch", "python"} <= manifest["versions"].keys()
    assert manifest["config_sha256"] == fingerprint(load(TrainConfig, folder / "config.yaml"))


def test_a_run_records_the_cpu_and_reports_changes_on_resume(
    train_here: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit means the same CPU features and versions: a comparison of two runs must show both."""
    folder = train_here("run", "stop.steps=2")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["versions"]["cpu"]
    assert manifest["versions"]["torch_cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    path.write_text(json.dumps({**manifest, "versions": {**manifest["versions"], "cpu": "Another avx512f"}}))
    capsys.readouterr()
    train_here("run", "stop.steps=3", resume=True)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"cpu was Another avx512f and is {manifest['versions']['cpu']} now" in shown
    assert json.loads(path.read_text())["versions"] == manifest["versions"]


def test_config_yaml_has_every_setting_including_defaults(train_here: Run) -> None:
    """Rule 37."""
    folder = train_here("run", "learner.clip_norm=0.5")
    config = load(TrainConfig, folder / "config.yaml")
    assert config.learner.clip_norm == 0.5
    assert "filter_zero_variance: false" in (folder / "config.yaml").read_text()


def test_each_evaluation_line_identifies_its_held_out_tasks(train_here: Run) -> None:
    """Rule 37."""
    for line in lines(train_here("run") / "evaluations.jsonl"):
        assert line["split"] == "test"
        assert line["episodes"] == 4
        assert line["task_set"]["hash"]


def test_the_final_policy_is_a_model_folder_to_train_from(train_here: Run) -> None:
    final = train_here("first") / "final"
    folder = train_here("second", model={"path": str(final)}, stop={"steps": 0})
    assert digest(folder / "model" / "model.safetensors") == digest(final / "model.safetensors")
    assert digest(folder / "final" / "model.safetensors") == digest(final / "model.safetensors")


def test_a_model_folder_without_a_model_is_rejected(train_here: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder has no config\.json, so it is not a model"):
        train_here("run", model={"path": str(tmp_path)})


def test_the_best_policy_is_kept_separately_from_the_last_checkpoints(
    train_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_success_rates(monkeypatch, [0.1, 0.3, 0.9, 0.2, 0.4, 0.6])
    folder = train_here(
        "run", evaluation={"every": 1}, checkpoints={"every": 1, "keep": 1}, stop={"steps": 5}
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["best_success"], summary["best_step"], summary["last_success"]) == (0.9, 2, 0.6)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best", "step-00000005"]
    state = json.loads((folder / "checkpoints" / "best" / "state.json").read_text())
    assert state["step"] == 2
    best = folder / "checkpoints" / "best" / "model"
    assert (best / "tokenizer.json").is_file()
    assert digest(best / "model.safetensors") != digest(folder / "final" / "model.safetensors")


def _set_success_rates(monkeypatch: pytest.MonkeyPatch, rates: list[float]) -> None:
    """Make evaluations return these success rates in order."""
    from rollgym.trainer import train_run as run

    real, left = run.evaluation_summary, list(rates)
    monkeypatch.setattr(run, "evaluation_summary", lambda *args: real(*args) | {"success_rate": left.pop(0)})


def test_token_values_are_saved_every_so_many_steps(train_here: Run) -> None:
    folder = train_here("run", tracking={"tokens_every": 2}, learner={"mini_batches": 1})
    for episode in lines(folder / "episodes.jsonl"):
        if episode["step"] % 2:
            assert "tokens" not in episode
            continue
        count = sum(len(turn["action_ids"]) for turn in episode["turns"])
        assert {name: len(values) for name, values in episode["tokens"].items()} == {
            "advantages": count,
            "ratios": count,
        }
        for advantage, ratio in zip(*episode["tokens"].values(), strict=True):
            assert ratio > 0
            assert advantage == 0 or ratio != 1, "one step was taken"


def test_a_run_prints_and_saves_its_plan(train_here: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_here("run", stop={"steps": 1})
    said = capsys.readouterr().err.splitlines()
    line = "local, colocated, strategy single on 1 rank, 1 embedded engine"
    start = said.index(f"plan: {line}")
    assert said[start + 1 : start + 5] == [
        "  devices       cpu",
        "  compute       learner float32, engine float32",
        "  weight sync   memory, float32",
        "  environments  in the trainer's process",
    ]
    assert sum(one.startswith("plan:") for one in said) == 1
    plan = json.loads((folder / "plan.json").read_text())
    assert {name: plan[name] for name in ("layout", "strategy", "ranks", "engine", "engines")} == {
        "layout": "colocated",
        "strategy": "single",
        "ranks": 1,
        "engine": "embedded",
        "engines": 1,
    }
    assert plan["dtypes"] == {"learner": "float32", "engine": "float32"}
    assert plan["weight_sync"] == {"route": "memory", "dtype": "float32", "delta": False}
    assert json.loads((folder / "manifest.json").read_text())["plan"] == line


def test_an_engine_in_bfloat16_is_recorded_with_its_gap_to_the_learner(train_here: Run) -> None:
    exact, rounded = (
        train_here(dtype, engine={"dtype": dtype}, learner={"old_logprobs": "recompute"}, stop={"steps": 1})
        for dtype in ("float32", "bfloat16")
    )
    assert json.loads((rounded / "plan.json").read_text())["dtypes"] == {
        "learner": "float32",
        "engine": "bfloat16",
    }
    (small,), (large,) = (lines(folder / "metrics.jsonl") for folder in (exact, rounded))
    assert 0.5 < large["weight_sync_bytes"] / small["weight_sync_bytes"] < 0.52, "vectors stay in float32"
    assert small["weight_sync_seconds"] > 0
    assert "weight_sync_changed_frac" not in small
    gap = "train_rollout_logprob_diff"
    assert small[gap] < 1e-5 < 1e-4 < large[gap] < 0.1
    assert abs(small["importance"] - 1) < 1e-5 < abs(large["importance"] - 1)


def test_invalid_actions_are_reported_at_the_first_step_and_marked(
    train_here: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollgym.view.overview import overview
    from rollgym.view.reader import RunView

    folder = train_here("run", "stop.steps=2", envs=[{"id": "lessons:Deaf"}])
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("warning: step 1: Only 0.0% of the actions were valid") == 1
    assert "warning: step 2" not in shown
    run = RunView(folder)
    run.follow()
    page = overview(run)
    assert [one["suspect"] for one in page["evaluations"]] == [True] * 3
    assert page["headline"]["trained"][0]["last"]["suspect"]
