"""Training on environments of other libraries, with the shipped configs made small."""

import json
from collections.abc import Callable
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from training import lines, merged

from rollgym.config.loader import parse

Run = Callable[..., Path]
SHORT: dict[str, Any] = {
    "warm_start": {"episodes": 60, "epochs": 1, "only_successful": False},
    "rollout": {"groups": 2, "group_size": 4},
    "learner": {"mini_batches": 1},
    "evaluation": {"every": 0, "episodes": 4},
    "checkpoints": {"every": 2},
    "stop": {"steps": 3},
}


@pytest.mark.parametrize(
    ("config", "package"), [("reasoning-gym-aiw", "reasoning-gym"), ("textarena-frozen-lake", "textarena")]
)
def test_a_shipped_config_trains_some_steps(train_here: Run, config: str, package: str) -> None:
    pytest.importorskip(package.replace("-", "_"), reason="the extra [adapters] is not installed")
    text = (resources.files("rollgym.trainer") / "configs" / f"{config}.yaml").read_text(encoding="utf-8")
    settings = merged(parse(text), SHORT)
    folder = train_here(**settings)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3]
    env_id = settings["envs"][0]["id"]
    episodes = lines(folder / "episodes.jsonl")
    assert len(episodes) == 24
    assert {(e["spec"]["env_id"], e["spec"]["split"]) for e in episodes} == {(env_id, "train")}
    assert {e["outcome"] for e in episodes} <= {"terminated", "truncated"}
    evaluations = lines(folder / "evaluations.jsonl")
    assert [line["phase"] for line in evaluations] == ["before", "warm_start", "after"]
    assert {(line["split"], line["episodes"]) for line in evaluations} == {("test", 4)}
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["versions"][package] == version(package)
