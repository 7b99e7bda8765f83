"""Names that 0.2.0 renamed: the errors give the new ones, and runs of 0.1.0 can be viewed but not resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, merged

from rollgym.config.loader import explain, load, parse, renamed_settings
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.renamed import METRICS
from rollgym.evaluation.run_results import load_run
from rollgym.trainer.config import TrainConfig, load_recorded
from rollgym.trainer.main import run_training
from rollgym.trainer.renamed import RENAMED_KEYS, RENAMED_VALUES
from rollgym.view.export import export
from rollgym.view.reader import RunView

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "run_0_1_0"
"""A run of bandit-grpo with 2 steps, written by 0.1.0."""
KEYS = {row.key for row in explain(TrainConfig)}
PAIRS = [(key, old, new) for key, values in RENAMED_VALUES.items() for old, new in values.items()]


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def refused(settings: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load(TrainConfig, merged(SMALL, settings), overrides)
    return str(error.value)


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_gives_the_new_one(old: str) -> None:
    new = RENAMED_KEYS[old]
    assert old not in KEYS
    assert new in KEYS
    sentence = f"{old} was renamed to {new} in 0.2.0"
    assert sentence in refused(nested(old, 3))
    assert f"override '{old}=3': {sentence}" in refused({}, f"{old}=3")
    with pytest.raises(UsageError, match=f"^{old} was renamed to {new} in 0.2.0.$"):
        explain(TrainConfig, old)


@pytest.mark.parametrize(("key", "old", "new"), PAIRS)
def test_an_old_value_gives_the_new_one(key: str, old: Any, new: Any) -> None:
    written, replaced = json.dumps(old).strip('"'), json.dumps(new).strip('"')
    assert key in KEYS
    assert f"{key}: {written} was renamed to {replaced} in 0.2.0." in refused(nested(key, old))


def test_an_old_key_with_an_old_value_gives_both() -> None:
    message = refused({"credit": {"divide_by": "one", "gamma": 0.5}, "agent": {"remember": False}})
    assert "credit was renamed to advantage in 0.2.0." in message
    new = "advantage.normalize_std"
    assert f"credit.divide_by was renamed to {new} in 0.2.0 (write {new}=false)." in message
    assert "agent.remember was renamed to agent.history in 0.2.0 (write agent.history=none)." in message


def test_keys_below_a_renamed_section_are_explained_by_their_new_name() -> None:
    with pytest.raises(UsageError, match=r"^credit\.gamma was renamed to advantage\.gamma in 0\.2\.0\.$"):
        explain(TrainConfig, "credit.gamma")
    assert refused({}, "credit.gamma=0.5") == (
        "override 'credit.gamma=0.5': credit was renamed to advantage in 0.2.0."
    )


def test_renamed_keys_are_reported_together_with_other_errors(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "envs: [{id: lessons:Yes}]\nrollout:\n  staleness: 1\n  gruops: 3\nengine: {kind: torch}\n"
    )
    with pytest.raises(UsageError) as error:
        load(TrainConfig, path)
    assert str(error.value).splitlines() == [
        "3 errors in the config:",
        f"  {path}:3: rollout.staleness was renamed to rollout.max_staleness in 0.2.0.",
        f"  {path}:5: engine.kind: torch was renamed to embedded in 0.2.0.",
        f"  {path}:4: rollout.gruops: unknown setting. Did you mean groups or group_size?",
    ]


def test_a_true_value_is_not_mistaken_for_an_old_one() -> None:
    assert (
        renamed_settings(TrainConfig, {"agent": {"history": 1}, "envs": [{"kwargs": {"strategy": 1}}]}) == {}
    )


def test_the_tables_cover_every_setting_that_0_1_0_wrote() -> None:
    """A config of 0.1.0 with all its settings loads once the tables are applied."""
    migrated: dict[str, Any] = {}

    def move(value: Any, key: str) -> None:
        if isinstance(value, dict) and key not in ("agent.chat_kwargs",):
            for name, inner in value.items():
                move(inner, f"{key}.{name}" if key else name)
            return
        new_key = TrainConfig.renames.new_key(key) or key
        new_value = TrainConfig.renames.new_value(new_key, value)
        section = migrated
        *sections, last = new_key.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = new_value[0] if new_value else value

    old = parse((OLD_RUN / "config.yaml").read_text())
    move(old, "")
    config = load(TrainConfig, migrated)
    assert renamed_settings(TrainConfig, old)
    assert (config.agent.history, config.engine.kind) == ("none", "embedded")
    assert config.learner.old_logprobs == "rollout"


def test_the_table_covers_every_metric_that_0_1_0_wrote(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run_training(
        "bandit-grpo", ["stop.steps=1", "warm_start=null", "rollout.groups=2"], tmp_path / "run", plain=True
    )
    new, old = (
        set(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))
        for folder in (tmp_path / "run", OLD_RUN)
    )
    later = {"fresh_token_frac", "staleness_p50", "staleness_p90", "staleness_p99"}
    later |= {"weight_sync_bytes", "weight_sync_seconds"}
    assert {METRICS.get(name, name) for name in old} == new - later


@pytest.mark.parametrize("old", METRICS)
def test_an_old_metric_gives_the_new_one(old: str, tmp_path: Path) -> None:
    new = METRICS[old]
    shutil.copytree(OLD_RUN, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, new: 0.5}) + "\n")
    with pytest.raises(UnknownName, match=f"{old} was renamed in 0.2.0: use {new}"):
        load_run(tmp_path / "run").metrics_array(old)


def test_an_unknown_metric_gives_the_nearest(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "entropy": 0.5}) + "\n")
    with pytest.raises(UnknownName, match="Did you mean entropy?"):
        load_run(tmp_path / "run").metrics_array("entropi")


def test_a_run_of_0_1_0_is_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(OLD_RUN, folder)
    with pytest.raises(UsageError) as error:
        run_training(None, ["stop.steps=3"], folder, resume=True)
    path = folder / "config.yaml"
    assert str(error.value) == (
        f"{path} was written by a version before 0.2.0, which renamed address, gpus, heartbeat_timeout, "
        f"strategy, agent.remember and 21 more (`rollgym config show {path}` lists all). Start a new run; "
        f"model.path={folder / 'final'} continues from this run's weights."
    )


def test_a_run_of_0_1_0_is_shown_by_the_viewer(tmp_path: Path) -> None:
    run = RunView(OLD_RUN)
    run.follow(final=True)
    assert len(run.metrics) == 2
    exported = export(OLD_RUN, tmp_path / "run.html")
    assert (exported.shown, exported.episodes) == (8, 8)


def test_a_recorded_config_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(SMALL))
    assert load_recorded(path) == load(TrainConfig, SMALL)
    path.write_text('{"envs": [], "seed": 0}')
    with pytest.raises(UsageError, match="envs"):
        load_recorded(path)
